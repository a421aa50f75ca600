"""Products with 8-bit float weights (e4m3: Micikevicius et al., "FP8 formats for deep learning", 2022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .linear_int4 import spread


class Fp8(NamedTuple):
    """A weight [out_features, in_features]: data * scale. With one scale per output, group = in_features."""

    data: Tensor  # [out_features, in_features] float8_e4m3fn, no NaN
    scale: Tensor  # [out_features, groups] float32
    group: int  # inputs per scale: a multiple of 32, or all inputs; the last group may be shorter
    rounds: bool = False  # W8A8: where it is faster, a product may round each row of activations to e4m3

    def dense(self) -> Tensor:
        """The weight [out_features, in_features] in the scales' dtype."""
        return self.data.to(self.scale.dtype) * spread(self.scale, self.group, self.data.shape[1])


def fp8(x: Tensor, weight: Fp8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The W8A16 product; linear.py has its arguments. Activations are not rounded; sums are float32 or wider. The
    kernels may compute the W8A8 product if weight.rounds."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.linear(x.to(wide), weight.dense().to(wide), None if bias is None else bias.to(wide))
    return out.to(dtype or x.dtype)
