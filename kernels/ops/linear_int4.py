"""Products with int4 weights; each group of inputs has a scale and a zero point (Frantar et al., GPTQ, 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .cases.case import REAL_ROWS, REAL_WIDTHS, Case, Make
from .linear_int8 import rounded


class Int4(NamedTuple):
    """A weight [out_features, in_features]: (nibble - zero) * scale. The inputs of a group are contiguous; the last
    group may be shorter."""

    # [out_features, ceil(in_features / 2)] uint8, the even input in the low nibble. If in_features is odd, the high
    # nibble of the last byte is 0.
    data: Tensor
    scale: Tensor  # [out_features, groups] float16
    zero: Tensor  # [out_features, groups] uint8, 0…16
    group: int  # inputs per scale and zero point, a multiple of 32
    in_features: int

    def dense(self) -> Tensor:
        """The weight [out_features, in_features] in float32, or in float64 if the scales are float64."""
        wide = torch.promote_types(self.scale.dtype, torch.float32)
        nibbles = torch.stack((self.data & 15, self.data >> 4), dim=-1).flatten(-2)[:, : self.in_features]
        zero, scale = (spread(part.to(wide), self.group, self.in_features) for part in (self.zero, self.scale))
        return (nibbles.to(wide) - zero) * scale


def spread(per_group: Tensor, group: int, in_features: int) -> Tensor:
    """[..., groups] -> [..., in_features]: repeats each value for every input of its group."""
    return per_group.repeat_interleave(group, -1)[..., :in_features]


def int4(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W4A8 product; linear.py has its arguments. linear_int8.rounded rounds each group of inputs of each row of x
    to int8; sums within a group are integers."""
    missing = -x.shape[-1] % weight.group
    grouped = F.pad(x.float(), (0, missing)).unflatten(-1, (-1, weight.group))
    integers, scale = rounded(grouped)
    wide = torch.promote_types(x.dtype, torch.float32)
    activations = (integers.to(wide) * scale.to(wide)).flatten(-2)[..., : x.shape[-1]]
    return _product(activations, weight, bias, dtype or x.dtype)


def int4_wide(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W4A16 product; linear.py has its arguments. Activations are not rounded."""
    return _product(x.to(torch.promote_types(x.dtype, torch.float32)), weight, bias, dtype or x.dtype)


def _product(x: Tensor, weight: Int4, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x, weight.dense().to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype)


def _inputs(
    rows: int, in_features: int, out_features: int, group: int, bias: bool = False, zeros: bool = False, **more: Any
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        groups = -(-in_features // group)
        x = torch.randn(rows, in_features, generator=generator)
        if zeros:
            x[::2, : group // 2] = 0.0
            x[::3] = 0.0
        data = torch.randint(0, 256, (out_features, -(-in_features // 2)), generator=generator).to(torch.uint8)
        if in_features % 2:
            data[:, -1] &= 15
        scale = (torch.rand(out_features, groups, generator=generator) / (4.0 * in_features**0.5)).half()
        zero = torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8)
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x.to(dtype), "weight": Int4(data, scale, zero, group, in_features), "bias": shift, **more}

    return make


CASES = [
    Case(f"linear.{op}", label, make, packs=("weight",))
    for op in ("int4", "int4_wide")
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96, 64)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 70, 49, 32)),
        ("600-rows", _inputs(600, 70, 40, 32)),
        ("short-last-group", _inputs(3, 165, 29, 64)),
        ("one-group", _inputs(3, 37, 33, 64)),
        ("group-128", _inputs(5, 256, 40, 128)),
        ("deep", _inputs(4, 3072, 33, 64)),
        ("deep-40-rows", _inputs(40, 1100, 33, 64)),
        ("bias", _inputs(5, 96, 50, 32, bias=True)),
        ("zeros", _inputs(7, 128, 32, 64, zeros=True)),
        ("head", _inputs(3, 64, 500, 64, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, 64, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case(f"linear.{op}", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths, 64), packs=("weight",))
    for op in ("int4", "int4_wide")
    for widths in REAL_WIDTHS
]
