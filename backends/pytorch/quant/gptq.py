"""GPTQ checkpoints (Frantar et al., 2022), 4 bits, as AutoGPTQ and GPTQModel write them.

qweight [in_features / 8, out_features] int32    eight inputs a word    scales [groups, out_features] float16
qzeros [groups, out_features / 8] int32  eight outputs a word   g_idx [in_features] int32, the group of each input
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Int4
from . import Loaded, Tensors
from .floats import STORED, Floats, check_finite
from .nibbles import group_size, half_scales, read_order, sorted_inputs, unpacked

ONES = 0x11111111  # 1 in each of the eight 4-bit numbers of a word


@dataclass(frozen=True, slots=True)
class Gptq:
    """Loads GPTQ weights. Version 1 of the format stores zero points minus 1, version 2 stores them unchanged."""

    config: Quantization

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight"):
            return Floats().load(tensors, name, out_features, in_features)
        if out_features % 8 or in_features % 8:
            raise ModelRefused(
                f"{name}: GPTQ packs groups of 8 numbers, but the weight is [{out_features}, {in_features}]"
            )
        group = group_size(self.config, in_features)
        groups = -(-in_features // group)
        packed = tensors.read(f"{name}.qweight", (in_features // 8, out_features), ("I32",))
        zeros = tensors.read(f"{name}.qzeros", (groups, out_features // 8), ("I32",))
        if self.config.zeros_less_one:
            # Add whole words: a stored -1 has borrowed 1 from the next 4-bit number, and the carry returns it.
            zeros = zeros + ONES
        scales = tensors.read(f"{name}.scales", (groups, out_features), STORED)
        check_finite(f"{name}.scales", scales)
        # A copy: a slice of outputs is strided in the file, and contiguous() keeps the strides of one row of words. A
        # byte has two inputs, the even one in its low bits.
        data = packed.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        zero = unpacked(zeros).t().contiguous()
        scale = half_scales(f"{name}.scales", scales.t().contiguous())
        order = read_order(tensors, f"{name}.g_idx", self.config, in_features, ("I32",))

        def rows(start: int, stop: int) -> Int4:
            weight = Int4(data[start:stop], scale[start:stop], zero[start:stop], group, in_features)
            return weight if order is None else sorted_inputs(weight, order)

        return Loaded(out_features, in_features, rows, wide=True, order=order)
