"""Products with int4 weights; each group of inputs has a scale and a zero point (Frantar et al., GPTQ, 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Case, Make
from .linear_int8 import rounded


class Int4(NamedTuple):
    """A weight [outs, ins]: (nibble - zero) * scale. Groups are contiguous inputs; the last may be shorter."""

    data: Tensor  # [outs, ceil(ins / 2)] uint8, the even input in the low nibble; the padding nibble of odd ins is 0
    scale: Tensor  # [outs, groups] float16
    zero: Tensor  # [outs, groups] uint8, 0…16
    group: int  # inputs, a multiple of 32
    ins: int

    def dense(self) -> Tensor:
        """The weight [outs, ins] in float32, or in float64 if the scales are float64."""
        wide = torch.promote_types(self.scale.dtype, torch.float32)
        nibbles = torch.stack((self.data & 15, self.data >> 4), dim=-1).flatten(-2)[:, : self.ins]
        zero, scale = (spread(part.to(wide), self.group, self.ins) for part in (self.zero, self.scale))
        return (nibbles.to(wide) - zero) * scale


def spread(per_group: Tensor, group: int, ins: int) -> Tensor:
    """[..., groups] -> [..., ins]: repeats each value for every input of its group."""
    return per_group.repeat_interleave(group, -1)[..., :ins]


def int4(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W4A8, with the arguments of linear.py. Each group of inputs of each row of x is rounded to int8 by
    linear_int8.rounded; sums within a group are integers."""
    missing = -x.shape[-1] % weight.group
    grouped = F.pad(x.float(), (0, missing)).unflatten(-1, (-1, weight.group))
    whole, scale = rounded(grouped)
    wide = torch.promote_types(x.dtype, torch.float32)
    activations = (whole.to(wide) * scale.to(wide)).flatten(-2)[..., : x.shape[-1]]
    return _product(activations, weight, bias, dtype or x.dtype)


def int4_wide(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W4A16, with the arguments of linear.py: activations are not rounded."""
    return _product(x.to(torch.promote_types(x.dtype, torch.float32)), weight, bias, dtype or x.dtype)


def _product(x: Tensor, weight: Int4, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x, weight.dense().to(x.dtype), None if bias is None else bias.to(x.dtype)).to(dtype)


def _inputs(rows: int, ins: int, outs: int, group: int, bias: bool = False, zeros: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        groups = -(-ins // group)
        x = torch.randn(rows, ins, generator=generator)
        if zeros:
            x[::2, : group // 2] = 0.0
            x[::3] = 0.0
        data = torch.randint(0, 256, (outs, -(-ins // 2)), generator=generator).to(torch.uint8)
        if ins % 2:
            data[:, -1] &= 15
        scale = (torch.rand(outs, groups, generator=generator) / (4.0 * ins**0.5)).half()
        zero = torch.randint(0, 17, (outs, groups), generator=generator).to(torch.uint8)
        shift = torch.randn(outs, generator=generator) if bias else None
        return {"x": x.to(dtype), "weight": Int4(data, scale, zero, group, ins), "bias": shift, **more}

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
