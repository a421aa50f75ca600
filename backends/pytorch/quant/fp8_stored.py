"""fp8 checkpoints (e4m3): one scale per block of outputs and inputs, per output, or per weight.

weight [outs, ins] e4m3; weight_scale_inv [blocks, blocks], [outs, 1] or [1]: despite its name, the values are
multiplied by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....engine.quantization import Quantization
from ....kernels.ops.linear import Fp8
from . import Loaded, Tensors
from .floats import STORED, Floats, check_finite


@dataclass(frozen=True, slots=True)
class Fp8Stored:
    """Activations are not quantised: scales for them in the files are ignored."""

    config: Quantization
    zero_biases: bool = False

    def load(self, tensors: Tensors, name: str, outs: int, ins: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, outs, ins)
        other_name = f"{name}.weight_scale_inv" not in tensors and f"{name}.weight_scale" in tensors
        scale = "weight_scale" if other_name else "weight_scale_inv"
        return read_fp8(tensors, name, outs, ins, self.config, scale)


def read_fp8(tensors: Tensors, name: str, outs: int, ins: int, config: Quantization, scale_name: str) -> Loaded:
    """The weight of `name`. Raises ModelRefused for a NaN and for scales that are missing or have another shape."""
    data = tensors.read(f"{name}.weight", (outs, ins), ("F8_E4M3",))
    for unused in ("input_scale", "activation_scale"):
        if f"{name}.{unused}" in tensors:
            tensors.read(f"{name}.{unused}", tensors.shape(f"{name}.{unused}"), STORED)
    if config.block:
        blocks = -(-outs // config.block), -(-ins // config.group)
        stored = tensors.read(f"{name}.{scale_name}", blocks, STORED)
        check_finite(f"{name}.{scale_name}", stored)
        scale = stored.float().repeat_interleave(config.block, 0)[:outs].contiguous()
        group = config.group
    else:
        scale = scales(tensors, f"{name}.{scale_name}", outs)
        group = ins

    def rows(start: int, stop: int) -> Fp8:
        part = data[start:stop]
        if (part.view(torch.uint8) & 0x7F == 0x7F).any():
            raise ModelRefused(f"tensor '{name}.weight' has a NaN", "the file is corrupt: download it again")
        return Fp8(part, scale[start:stop], group)

    return Loaded(outs, ins, rows)


def scales(tensors: Tensors, name: str, outs: int) -> Tensor:
    """Scales [outs, 1] float32, from one scale per output or one for the whole weight."""
    shape = tensors.shape(name)
    flat = (), (1,), (1, 1), (outs,)
    stored = tensors.read(name, shape if shape in flat else (outs, 1), STORED)
    check_finite(name, stored)
    return stored.float().flatten().expand(outs).contiguous().unsqueeze(1)
