"""compressed-tensors checkpoints, as llm-compressor writes them.

int4  weight_packed [out_features, in_features / 8] int32, eight inputs a word; weight_scale [out_features, groups];
      weight_zero_point [out_features / 8, groups] int32, eight outputs a word; weight_g_idx [in_features];
      weight_shape [2]
int8  weight [out_features, in_features] int8, weight_scale [out_features, 1] or [1]
fp8   weight [out_features, in_features] e4m3, weight_scale [out_features, 1], [1] or [blocks, blocks]
mxfp4 weight_packed [out_features, in_features / 2] uint8, weight_scale [out_features, in_features / 32] uint8
      exponents
nvfp4 weight_packed as for mxfp4; weight_scale [out_features, in_features / 16] e4m3; weight_global_scale [1] float32,
      by which the values are divided; input_global_scale [1], which is ignored: activations are not quantised
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....engine.files.quantization import Quantization
from ....kernels.ops.linear import Int4, Int8, Mxfp4, Weight
from ....kernels.ops.linear_int4 import spread
from ....kernels.ops.linear_mxfp4 import E2M1
from . import Loaded, Tensors, quotient
from .floats import STORED, Floats, check_finite
from .fp8_stored import read_fp8, scales
from .mxfp4 import groups_of, loaded_mxfp4
from .nibbles import group_size, half_scales, read_order, sorted_inputs, unpacked


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Loads weights of compressed-tensors. nvfp4 weights, and int8 weights whose activations are floats, are converted
    to bfloat16."""

    config: Quantization

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, out_features, in_features)
        match self.config.format:
            case "int4":
                return self._int4(tensors, name, out_features, in_features)
            case "int8":
                return self._int8(tensors, name, out_features, in_features)
            case "mxfp4":
                return self._mxfp4(tensors, name, out_features, in_features)
            case "nvfp4":
                return self._nvfp4(tensors, name, out_features, in_features)
        return read_fp8(tensors, name, out_features, in_features, self.config, "weight_scale")

    def _int4(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        group = group_size(self.config, in_features)
        groups = -(-in_features // group)
        packed = tensors.read(f"{name}.weight_packed", (out_features, -(-in_features // 8)), ("I32",))
        scale = tensors.read(f"{name}.weight_scale", (out_features, groups), STORED)
        check_finite(f"{name}.weight_scale", scale)
        _check_shape(tensors, f"{name}.weight_shape", [out_features, in_features])
        zero = torch.full((out_features, groups), 8, dtype=torch.uint8)
        if not self.config.symmetric:
            zeros = tensors.read(f"{name}.weight_zero_point", (-(-out_features // 8), groups), ("I32",))
            zero = unpacked(zeros.t().contiguous())[:, :out_features].t().contiguous()
        halves = half_scales(f"{name}.weight_scale", scale)
        order = read_order(tensors, f"{name}.weight_g_idx", self.config, in_features, ("I32", "I64"))

        def rows(start: int, stop: int) -> Int4:
            # A byte has two inputs, the even one in its low bits.
            data = packed[start:stop].view(torch.uint8)[:, : -(-in_features // 2)]
            if in_features % 2:
                data = data.clone()
                data[:, -1] &= 15
            weight = Int4(data, halves[start:stop], zero[start:stop], group, in_features)
            return weight if order is None else sorted_inputs(weight, order)

        return Loaded(out_features, in_features, rows, wide=True, order=order)

    def _int8(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        data = tensors.read(f"{name}.weight", (out_features, in_features), ("I8",))
        scale = scales(tensors, f"{name}.weight_scale", out_features)

        def rows(start: int, stop: int) -> Weight:
            if self.config.rounds_activations:
                return Int8(data[start:stop], scale[start:stop].flatten())
            wide: Tensor = (data[start:stop].float() * scale[start:stop]).bfloat16()
            return wide

        return Loaded(out_features, in_features, rows)

    def _mxfp4(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        groups = groups_of(name, in_features)
        packed = tensors.read(f"{name}.weight_packed", (out_features, in_features // 2), ("U8",))
        exponents = tensors.read(f"{name}.weight_scale", (out_features, groups), ("U8",))
        return loaded_mxfp4(packed, exponents, f"{name}.weight_scale")

    def _nvfp4(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        """A number times its scale has 6 significant bits, which bfloat16 has; their quotient by the scale of the
        tensor is rounded."""
        group = self.config.group
        if in_features % group:
            raise ModelRefused(f"{name}: NVFP4 needs a multiple of {group} inputs, but the weight has {in_features}")
        packed = tensors.read(f"{name}.weight_packed", (out_features, in_features // 2), ("U8",))
        scale = tensors.read(f"{name}.weight_scale", (out_features, in_features // group), ("F8_E4M3",))
        divisor = _positive(tensors, f"{name}.weight_global_scale")
        if f"{name}.input_global_scale" in tensors:
            _positive(tensors, f"{name}.input_global_scale")
        values = torch.tensor(E2M1)

        def rows(start: int, stop: int) -> Tensor:
            scales = scale[start:stop].float()
            check_finite(f"{name}.weight_scale", scales)
            numbers = Mxfp4(packed[start:stop], packed[:0]).numbers.int()
            return quotient(values[numbers] * spread(scales, group, in_features), divisor).bfloat16()

        return Loaded(out_features, in_features, rows)


def converted_values(config: Quantization, name: str, dtype: str, num_bytes: int) -> int | None:
    """The number of bfloat16 values that a tensor becomes; None if its bytes stay. `dtype`: that of the file."""
    if config.method != "compressed-tensors":
        return None
    if config.format == "nvfp4" and dtype not in STORED:
        return 2 * num_bytes if name.endswith(".weight_packed") else 0
    return num_bytes if dtype == "I8" and not config.rounds_activations else None


def _positive(tensors: Tensors, name: str) -> float:
    """The only value of a tensor. Raises ModelRefused if it is not positive and finite."""
    value = tensors.read(name, () if tensors.shape(name) == () else (1,), ("F32",)).item()
    if not 0.0 < value < math.inf:
        raise ModelRefused(f"tensor {name!r} is {value:g}, a positive number expected", "download the file again")
    return value


def _check_shape(tensors: Tensors, name: str, expected: list[int]) -> None:
    """Raises ModelRefused if the tensor `name`, which holds the shape of a weight, exists and is not `expected`."""
    if name in tensors:
        shape = tensors.read(name, (2,), ("I64", "I32")).tolist()
        if shape != expected:
            raise ModelRefused(f"{name} is {shape}, but config.json needs {expected}")
