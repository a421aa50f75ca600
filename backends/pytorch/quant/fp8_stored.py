"""fp8 checkpoints (e4m3). A scale belongs to a block of outputs and inputs, to an output, or to the whole weight.

weight [out_features, in_features] e4m3; weight_scale_inv [blocks, blocks], [out_features, 1] or [1]: despite its name,
the values are multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Fp8
from . import Loaded, Tensors
from .floats import STORED, Floats, check_finite


@dataclass(frozen=True, slots=True)
class Fp8Stored:
    """Loads fp8 weights. Ignores the scales of activations in the files: activations are not quantised."""

    config: Quantization

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, out_features, in_features)
        has_other_name = f"{name}.weight_scale_inv" not in tensors and f"{name}.weight_scale" in tensors
        scale = "weight_scale" if has_other_name else "weight_scale_inv"
        return read_fp8(tensors, name, out_features, in_features, self.config, scale)


def read_fp8(
    tensors: Tensors, name: str, out_features: int, in_features: int, config: Quantization, scale_name: str
) -> Loaded:
    """The weight of the projection `name`. Raises ModelRefused for NaN, and if its scales are missing or have a wrong
    shape."""
    data = tensors.read(f"{name}.weight", (out_features, in_features), ("F8_E4M3",))
    for unused in ("input_scale", "activation_scale"):
        if f"{name}.{unused}" in tensors:
            tensors.read(f"{name}.{unused}", tensors.shape(f"{name}.{unused}"), STORED)
    if config.block:
        blocks = -(-out_features // config.block), -(-in_features // config.group)
        stored = tensors.read(f"{name}.{scale_name}", blocks, STORED)
        check_finite(f"{name}.{scale_name}", stored)
        scale = stored.float().repeat_interleave(config.block, 0)[:out_features].contiguous()
        group = config.group
    else:
        scale = scales(tensors, f"{name}.{scale_name}", out_features)
        group = in_features

    def rows(start: int, stop: int) -> Fp8:
        values = data[start:stop]
        if (values.view(torch.uint8) & 0x7F == 0x7F).any():
            raise ModelRefused(f"tensor '{name}.weight' has a NaN", "the file is corrupt: download it again")
        return Fp8(values, scale[start:stop], group)

    return Loaded(out_features, in_features, rows)


def scales(tensors: Tensors, name: str, out_features: int) -> Tensor:
    """Scales [out_features, 1] float32, from one scale per output or one for the whole weight."""
    shape = tensors.shape(name)
    accepted = ((), (1,), (1, 1), (out_features,), (out_features, 1))
    stored = tensors.read(name, shape if shape in accepted else (out_features, 1), STORED)
    check_finite(name, stored)
    return stored.float().flatten().expand(out_features).contiguous().unsqueeze(1)
