"""Quantises weights to int8 while loading. The largest magnitude of each output becomes 127."""

from __future__ import annotations

from torch import Tensor

from ....kernels.ops.linear import Int8
from . import quotient


def quantise(weight: Tensor) -> Int8:
    """weight [out_features, in_features] of any float type, finite. Rounded to nearest, ties to even."""
    wide = weight.float()
    scale = quotient(wide.abs().amax(1), 127.0)
    data = (wide / scale.clamp(min=1e-30).unsqueeze(1)).round_()
    return Int8(data.clamp_(-127, 127).char(), scale)
