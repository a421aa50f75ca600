"""Weights stored as ordinary floats: kept, or made smaller while loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....kernels.ops.linear import Weight
from . import Loaded, Tensors, changed, parts

STORED = ("BF16", "F16", "F32")
SLAB = 2**24  # values made smaller at a time, so that their float32 copies stay small


@dataclass(frozen=True, slots=True)
class Floats:
    """Takes `name.weight` as it is, or through `quantise`."""

    quantise: Callable[[Tensor], Weight] | None = None
    zero_biases: bool = False

    def load(self, tensors: Tensors, name: str, outs: int, ins: int) -> Loaded:
        weight = tensors.read(f"{name}.weight", (outs, ins), STORED)
        check_finite(f"{name}.weight", weight)
        return Loaded(weight if self.quantise is None else in_slabs(weight, self.quantise))


def check_finite(name: str, values: Tensor) -> None:
    """Raises ModelRefused where there is a NaN or an infinity: sums are of float32, and none hides in them."""
    slabs = values.flatten().split(SLAB // 16)
    if not all(slab.sum(dtype=torch.float32).isfinite() for slab in slabs):
        raise ModelRefused(f"tensor {name!r} holds a NaN or an infinity", "the file is damaged: download it again")


def in_slabs(weight: Tensor, quantise: Callable[[Tensor], Weight]) -> Weight:
    """quantise(weight), a number of outputs at a time; formats with a scale for each output or less only."""
    step = max(1, SLAB // max(1, weight.shape[1]))
    if step >= len(weight):
        return quantise(weight)
    made: Weight | None = None
    for start in range(0, len(weight), step):
        slab = quantise(weight[start : start + step])
        if made is None:
            made = changed(slab, lambda part: part.new_empty(len(weight), *part.shape[1:]))
        for whole, part in zip(parts(made), parts(slab), strict=True):
            whole[start : start + step] = part
    assert made is not None
    return made
