"""Quantises weights to int4 while loading: 16 values for each group of 64 inputs, from its minimum to its maximum."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ....kernels.ops.linear import Int4
from . import quotient
from .nibbles import paired

GROUP = 64


def quantise(weight: Tensor) -> Int4:
    """weight [out_features, in_features] of any float type, finite.

    Zero is always representable. The scale is rounded to float16 first; the weights are divided by the rounded scale.
    """
    out_features, in_features = weight.shape
    grouped = F.pad(weight.float(), (0, -in_features % GROUP)).view(out_features, -1, GROUP)
    low = grouped.amin(-1).clamp_(max=0.0)
    high = grouped.amax(-1).clamp_(min=0.0)
    scale = quotient(high - low, 15.0).half()
    step = scale.float().clamp(min=1e-30)
    zero = (-low / step).round_().clamp_(0, 15)
    nibbles = (grouped / step.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, 15).byte()
    return Int4(paired(nibbles.flatten(1)[:, :in_features]), scale, zero.byte(), GROUP, in_features)
