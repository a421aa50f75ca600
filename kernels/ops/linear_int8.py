"""Products of int8 weights and activations rounded to int8 (W8A8; Dettmers et al., LLM.int8(), 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .cases.case import REAL_ROWS, REAL_WIDTHS, Case, Make


class Int8(NamedTuple):
    """A weight [out_features, in_features]: data * scale, one scale per output."""

    data: Tensor  # [out_features, in_features] int8
    scale: Tensor  # [out_features] float32

    def dense(self) -> Tensor:
        """The weight [out_features, in_features] in the scales' dtype."""
        return self.data.to(self.scale.dtype) * self.scale.unsqueeze(-1)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each vector of the last dimension of x to (integers -127…127, one scale), both float32.

    The scale is the vector's largest magnitude / 127. The integers are x * (127 / largest magnitude), rounded to
    nearest, ties to even. Zeros stay zeros. If the vector has a NaN or an infinity, integers * scale is NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    # torch computes `127.0 / tensor` as 127 times a rounded reciprocal; it divides a tensor by a tensor correctly.
    factor = torch.full_like(largest, 127.0) / largest
    integers = torch.where(largest == 0, 0.0, (x * factor).round())
    return integers, largest / 127.0


def int8(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W8A8 product; linear.py has its arguments. `rounded` rounds every row of x to int8; sums are integers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    integers, scale = rounded(x)
    out = F.linear(integers.to(wide), weight.data.to(wide)) * (scale.to(wide) * weight.scale.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(dtype or x.dtype)


def _inputs(
    rows: int, in_features: int, out_features: int, bias: bool = False, zeros: bool = False, **more: Any
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, in_features, generator=generator)
        if zeros:
            x[::2] = 0.0
        data = torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
        weight = Int8(data, torch.rand(out_features, generator=generator) / (64.0 * in_features**0.5))
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x.to(dtype), "weight": weight, "bias": shift, **more}

    return make


CASES = [
    Case("linear.int8", label, make, packs=("weight",))
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 70, 49)),
        ("600-rows", _inputs(600, 70, 40)),
        ("odd-shape", _inputs(3, 37, 29)),
        ("one-by-one", _inputs(2, 1, 1)),
        ("deep", _inputs(4, 3000, 33)),
        ("deep-40-rows", _inputs(40, 1100, 33)),
        ("bias", _inputs(5, 65, 50, bias=True)),
        ("zeros", _inputs(5, 64, 32, zeros=True)),
        ("head", _inputs(3, 64, 500, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case("linear.int8", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths), packs=("weight",))
    for widths in REAL_WIDTHS
]
