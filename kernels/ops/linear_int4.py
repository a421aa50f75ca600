"""Products with int4 weights; each group of inputs has a scale and a zero point (Frantar et al., GPTQ, 2022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
