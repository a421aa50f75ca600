"""Products of many rows with quantised weights. A kernel dequantises some outputs of the weight at a time into memory,
and torch multiplies them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_CHUNK = 2**26  # largest number of weights that are dequantised into memory at a time
BLOCK = 64  # outputs in each chunk except the last one are a multiple of this

Widen = Callable[[int, Tensor], None]  # dequantises the outputs from a number on into a tensor [outputs, in_features]
Sums = Callable[[Tensor, Tensor], Tensor]  # x and weights [outputs, in_features] -> x @ weights.T, float32


def widened_product(
    x: Tensor, out_features: int, widen: Widen, sums: Sums, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [rows, in_features] times a weight that `widen` dequantises, plus the bias -> [rows, out_features], `dtype`."""
    in_features = x.shape[1]
    largest = max(BLOCK, MAX_CHUNK // in_features // BLOCK * BLOCK)
    chunks = -(-out_features // largest)
    size = -(-out_features // chunks // BLOCK) * BLOCK
    out = x.new_empty(len(x), out_features, dtype=dtype)
    weights = x.new_empty(min(size, out_features), in_features)
    for start in range(0, out_features, size):
        stop = min(start + size, out_features)
        part = weights[: stop - start]
        widen(start, part)
        if bias is None and dtype == x.dtype:
            torch.mm(x, part.t(), out=out[:, start:stop])
        else:
            product = sums(x, part)
            out[:, start:stop] = product if bias is None else product + bias[start:stop]
    return out
