"""Products with int4 weights by oneDNN, through torch's op. kernels/ops/linear_int4.py has the reference.

The op computes x @ ((nibble - zero) * scale)ᵀ and takes no order of inputs, so every checkpoint of 4 bits arrives as
Int4, with sorted inputs (backends/pytorch/quant).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import Ops, linear
from ..ops.linear import Int4, Weight

OP = "_weight_int4pack_mm_with_scales_and_zeros"
DTYPE = torch.bfloat16  # of activations; the references compute other ones


class Int4Words(NamedTuple):
    """An Int4 weight as the op reads it."""

    data: Tensor  # [out_features, in_features / 8] int32, the first input in the lowest four bits
    scale: Tensor  # [groups, out_features] bfloat16, as the op requires
    zero: Tensor  # [groups, out_features] int8
    group: int

    @property
    def out_features(self) -> int:
        return len(self.data)


def is_present() -> bool:
    """True if torch has the op for Intel GPUs; without an XPU build of torch, if torch has its schema."""
    if not torch.xpu._is_compiled():
        return hasattr(torch.ops.aten, OP)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{OP}", "XPU")


def with_onednn(ops: Ops) -> Ops:
    """`ops`, with oneDNN's products for floats, which are torch's own, and for the int4 weights that it supports."""
    others = replace(ops.linear, dense=linear.dense)

    def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
        """See linear.pack_slices."""
        slices = iter(slices)
        first = next(slices)
        slices = chain([first], slices)
        if isinstance(first, Int4) and dtype == DTYPE and first.in_features % first.group == 0:
            return _words(slices, first, out_features)
        return others.pack_slices(slices, out_features, dtype)

    def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """See linear_int4.int4. Activations are not rounded to int8."""
        product = _product if isinstance(weight, Int4Words) else others.int4
        return product(x, weight, bias, dtype)

    def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """See linear_int4.int4_wide."""
        product = _product if isinstance(weight, Int4Words) else others.int4_wide
        return product(x, weight, bias, dtype)

    return replace(ops, linear=replace(others, int4=int4, int4_wide=int4_wide, pack_slices=pack_slices))


def _words(slices: Iterable[Any], first: Int4, out_features: int) -> Int4Words:
    data = first.data.new_empty(out_features, first.data.shape[1])
    scale = first.scale.new_empty(first.scale.shape[1], out_features, dtype=DTYPE)
    zero = first.zero.new_empty(scale.shape, dtype=torch.int8)
    start = 0
    for part in slices:
        stop = start + len(part.data)
        data[start:stop] = part.data
        scale[:, start:stop] = part.scale.t()
        zero[:, start:stop] = part.zero.t()
        start = stop
    return Int4Words(data.view(torch.int32), scale, zero, first.group)


def _product(x: Tensor, weight: Int4Words, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """x [..., in_features] -> [..., out_features], rounded to bfloat16."""
    rows = x.flatten(0, -2).to(DTYPE).contiguous()
    op = getattr(torch.ops.aten, OP)
    sums = op(rows, weight.data, weight.group, weight.scale, weight.zero) if len(rows) else rows.new_empty(0, 0)
    output = sums.reshape(*x.shape[:-1], weight.out_features).to(dtype or x.dtype)
    return output if bias is None else output + bias.to(output.dtype)
