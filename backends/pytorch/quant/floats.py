"""Weights stored as floats: loaded unchanged, or quantised while loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....kernels.ops.linear import Weight
from . import Loaded, Tensors

STORED = ("BF16", "F16", "F32")
SLAB = 2**20  # number of values that are summed at a time


@dataclass(frozen=True, slots=True)
class Floats:
    """Loads `name.weight` unchanged, or quantised by `quantise` on the device of torch's type `device`."""

    quantise: Callable[[Tensor], Weight] | None = None
    device: str = "cpu"

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        weight = tensors.read(f"{name}.weight", (out_features, in_features), STORED)

        def rows(start: int, stop: int) -> Weight:
            values = weight[start:stop]
            if self.quantise is not None:
                values = values.to(self.device)
            check_finite(f"{name}.weight", values)
            return values if self.quantise is None else self.quantise(values)

        return Loaded(out_features, in_features, rows)


def check_finite(name: str, values: Tensor) -> None:
    """Raises ModelRefused if `values` has a NaN or an infinity."""
    slabs = values.flatten().split(SLAB)
    # A NaN or an infinity makes the sum of its slab NaN or infinite.
    if not all(slab.sum(dtype=torch.float32).isfinite() for slab in slabs):
        raise ModelRefused(f"tensor {name!r} has a NaN or an infinity", "the file is corrupt: download it again")
