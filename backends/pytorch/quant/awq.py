"""AWQ checkpoints (Lin et al., 2023), 4 bits, in the layout of AutoAWQ's "gemm" kernels.

qweight [in_features, out_features / 8] int32    eight outputs a word: 0 2 4 6 1 3 5 7, low bits first
qzeros [groups, out_features / 8] int32          as qweight
scales [groups, out_features] float16
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Int4
from . import Loaded, Tensors
from .floats import STORED, Floats, check_finite
from .nibbles import group_size, half_scales, paired, unpacked

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """Loads AWQ weights. A symmetric checkpoint stores no zero points: all of them are 8."""

    config: Quantization

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight"):
            return Floats().load(tensors, name, out_features, in_features)
        if out_features % 8:
            raise ModelRefused(f"{name}: AWQ packs groups of 8 outputs, but the weight has {out_features}")
        group = group_size(self.config, in_features)
        groups = -(-in_features // group)
        # A copy, because a slice of outputs is strided in the file.
        packed = tensors.read(f"{name}.qweight", (in_features, out_features // 8), ("I32",)).clone()
        scales = tensors.read(f"{name}.scales", (groups, out_features), STORED)
        check_finite(f"{name}.scales", scales)
        if self.config.symmetric:
            zero = torch.full((out_features, groups), 8, dtype=torch.uint8)
        else:
            zeros = tensors.read(f"{name}.qzeros", (groups, out_features // 8), ("I32",))
            zero = unpacked(zeros, ORDER).t().contiguous()
        scale = half_scales(f"{name}.scales", scales.t().contiguous())

        def rows(start: int, stop: int) -> Int4:
            nibbles = unpacked(packed[:, start // 8 : stop // 8], ORDER).t().contiguous()
            return Int4(paired(nibbles), scale[start:stop], zero[start:stop], group, in_features)

        return Loaded(out_features, in_features, rows, wide=True)
