"""Quantises weights to fp8 (e4m3) while loading. The largest magnitude of each output becomes 448, e4m3's maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.ops.linear import Fp8
from . import quotient

LARGEST = 448.0


def quantise(weight: Tensor) -> Fp8:
    """weight [out_features, in_features] of any float type, finite. Rounded to nearest, ties to even."""
    wide = weight.float()
    scale = quotient(wide.abs().amax(1, keepdim=True), LARGEST)
    data = (wide / scale.clamp(min=1e-30)).clamp_(-LARGEST, LARGEST)
    return Fp8(data.to(torch.float8_e4m3fn), scale, weight.shape[1])


def quantise_w8a8(weight: Tensor) -> Fp8:
    """The same weight. Products may round the activations to e4m3, too."""
    return quantise(weight)._replace(rounds=True)
