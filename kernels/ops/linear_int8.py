"""Products of int8 weights and activations rounded to int8 (W8A8; Dettmers et al., LLM.int8(), 2022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Int8(NamedTuple):
    """A weight [out_features, in_features]: data * scale, one scale per output."""

    data: Tensor  # [out_features, in_features] int8
    scale: Tensor  # [out_features] float32
    # [out_features, 2] float32, equal for all outputs: static scale and offset of activations, which become
    # round(x / scale + offset), -128…127. None: each row of activations gets a scale.
    inputs: Tensor | None = None

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


def _statically_rounded(x: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """x without its rounding errors below half a scale, in units of the scale, and the scale."""
    scale, offset = inputs[0]
    return (x.float() / scale + offset).round().clamp(-128, 127) - offset, scale


def int8(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W8A8 product; linear.py has its arguments. `rounded` rounds every row of x to int8, or weight.inputs all of
    them; sums are integers."""
    wide = torch.promote_types(x.dtype, torch.float32)
    integers, scale = rounded(x) if weight.inputs is None else _statically_rounded(x, weight.inputs)
    out = F.linear(integers.to(wide), weight.data.to(wide)) * (scale.to(wide) * weight.scale.to(wide))
    return (out if bias is None else out + bias.to(wide)).to(dtype or x.dtype)
