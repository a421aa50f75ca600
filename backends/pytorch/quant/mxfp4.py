"""MXFP4 checkpoints (OCP Microscaling Formats, 2023): floats of 4 bits (e2m1), with one power of two per 32 inputs.

blocks [out_features, in_features / 32, 16] uint8, two inputs a byte, the even input in the low bits
scales [out_features, in_features / 32] uint8, the exponent of the power of two plus 127

The weights become fp8 with groups of 32 inputs, which has all of these values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....engine.errors import ModelRefused
from ....engine.quantization import Quantization
from ....kernels.ops.linear import Fp8
from . import Loaded, Tensors
from .floats import STORED, Floats

GROUP = 32  # inputs per scale
NAN = 255  # the scale that is not a number
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))  # the values of the 16 numbers


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Loads MXFP4 weights. Projections that are floats in the files stay floats."""

    config: Quantization
    zero_biases: bool = False

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, out_features, in_features)
        if in_features % GROUP:
            raise ModelRefused(f"{name}: MXFP4 needs a multiple of {GROUP} inputs, but the weight has {in_features}")
        groups = in_features // GROUP
        blocks = tensors.read(f"{name}.blocks", (out_features, groups, GROUP // 2), ("U8",))
        exponents = tensors.read(f"{name}.scales", (out_features, groups), ("U8",))
        values = torch.tensor(VALUES).to(torch.float8_e4m3fn).view(torch.uint8)

        def rows(start: int, stop: int) -> Fp8:
            packed = blocks[start:stop].flatten(1)
            numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
            exponent = exponents[start:stop]
            if (exponent == NAN).any():
                raise ModelRefused(f"tensor '{name}.scales' has a NaN", "the file is corrupt: download it again")
            data = values[numbers.int()].view(torch.float8_e4m3fn)
            return Fp8(data, torch.ldexp(torch.ones(exponent.shape), exponent.int() - 127), GROUP)

        return Loaded(out_features, in_features, rows)
