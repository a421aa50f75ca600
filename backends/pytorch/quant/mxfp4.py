"""MXFP4 checkpoints (OCP Microscaling Formats, 2023): floats of 4 bits (e2m1), with one power of two per 32 inputs.

blocks [out_features, in_features / 32, 16] uint8, two inputs a byte, the even input in the low bits
scales [out_features, in_features / 32] uint8, the exponent of the power of two plus 127
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Mxfp4
from ....kernels.ops.linear_mxfp4 import GROUP
from . import Loaded, Tensors
from .floats import STORED, Floats

NAN = 255  # the scale that is not a number


@dataclass(frozen=True, slots=True)
class Mxfp4Stored:
    """Loads MXFP4 weights. Projections that are floats in the files stay floats."""

    config: Quantization

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, out_features, in_features)
        groups = groups_of(name, in_features)
        blocks = tensors.read(f"{name}.blocks", (out_features, groups, GROUP // 2), ("U8",))
        exponents = tensors.read(f"{name}.scales", (out_features, groups), ("U8",))
        return loaded_mxfp4(blocks, exponents, f"{name}.scales")


def groups_of(name: str, in_features: int) -> int:
    """The number of groups of inputs of the projection `name`. Raises ModelRefused if the last one is not full."""
    if in_features % GROUP:
        raise ModelRefused(f"{name}: MXFP4 needs a multiple of {GROUP} inputs, but the weight has {in_features}")
    return in_features // GROUP


def loaded_mxfp4(numbers: Tensor, exponents: Tensor, where: str) -> Loaded:
    """The weight with `numbers` [out_features, ...], whose bytes per output are in the order of the inputs, and
    `exponents` [out_features, groups]. `where`: the tensor of the exponents, for the error for NaN."""

    def rows(start: int, stop: int) -> Mxfp4:
        exponent = exponents[start:stop]
        if (exponent == NAN).any():
            raise ModelRefused(f"tensor {where!r} has a NaN", "the file is corrupt: download it again")
        return Mxfp4(numbers[start:stop].flatten(1), exponent)

    return Loaded(len(numbers), GROUP * exponents.shape[1], rows)
