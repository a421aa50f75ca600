"""Checkpoints of Ascend's msModelSlim with int8 weights and activations (W8A8).

weight [out_features, in_features] int8; weight_scale, weight_offset [out_features, 1]
input_scale, input_offset [1]                  static: an activation becomes round(x / scale + offset), -128…127
deq_scale [out_features] float32               static: input_scale * weight_scale; as int64, its low half is the float32
quant_bias [out_features] int32                static: bias / deq_scale - input_offset * sum of the weights of an output

A projection without input_scale is dynamic: each row of activations gets a scale. `.bias` is a part of quant_bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....engine.errors import ModelRefused
from ....kernels.ops.linear import Int8
from . import Loaded, Tensors
from .floats import STORED, Floats, check_finite

AGREEMENT = 0.02  # relative difference of deq_scale and the product of the scales, which may be bfloat16


@dataclass(frozen=True, slots=True)
class Modelslim:
    """Loads W8A8 weights. `static`: the device rounds activations by the scale of the files; other devices give a scale
    to each row, which is at least as accurate."""

    static: bool = False

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        if tensors.dtype(f"{name}.weight") in STORED:
            return Floats().load(tensors, name, out_features, in_features)
        data = tensors.read(f"{name}.weight", (out_features, in_features), ("I8",))
        scale = _by_output(tensors, f"{name}.weight_scale", out_features)
        _refuse_offset(tensors, f"{name}.weight_offset", out_features)
        bias: Tensor | None = None
        inputs: tuple[float, float] | None = None
        if f"{name}.input_scale" in tensors:
            inputs = _number(tensors, f"{name}.input_scale"), _number(tensors, f"{name}.input_offset")
            scale, bias = _static(tensors, name, data, scale, inputs)
        if scale is None:
            raise ModelRefused(f"tensor {name}.weight_scale is missing", "download the model again")
        by_output = scale
        kept = inputs if self.static else None

        def rows(start: int, stop: int) -> Int8:
            static = None if kept is None else torch.tensor(kept).expand(stop - start, 2)
            return Int8(data[start:stop], by_output[start:stop], static)

        return Loaded(out_features, in_features, rows, bias=bias, inputs=kept)


def _static(
    tensors: Tensors, name: str, data: Tensor, scale: Tensor | None, inputs: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The scales of a static projection, and its bias [out_features] float32."""
    outputs = len(data)
    input_scale, input_offset = inputs
    if not input_scale > 0.0 or not math.isfinite(input_offset):
        raise ModelRefused(f"{name}: input_scale {input_scale:g} or input_offset {input_offset:g} is wrong")
    factors = _deq_scale(tensors, f"{name}.deq_scale", outputs)
    if scale is not None and not torch.allclose(scale * input_scale, factors, rtol=AGREEMENT, atol=0.0):
        raise ModelRefused(f"{name}: deq_scale is not input_scale * weight_scale", "download the model again")
    integers = tensors.read(f"{name}.quant_bias", (outputs,), ("I32",)).double()
    integers += input_offset * data.sum(1, dtype=torch.int64)
    if f"{name}.bias" in tensors:
        tensors.read(f"{name}.bias", (outputs,), STORED)  # a part of quant_bias
    return factors / input_scale, (integers * factors.double()).float()


def _deq_scale(tensors: Tensors, name: str, outputs: int) -> Tensor:
    """The factors [outputs] float32 of the sums of integers."""
    stored = tensors.read(name, (outputs,), ("F32", "I64"))
    if stored.dtype == torch.int64:
        stored = stored.contiguous().view(torch.int32).view(-1, 2)[:, 0].contiguous().view(torch.float32)
    check_finite(name, stored)
    return stored


def _by_output(tensors: Tensors, name: str, outputs: int) -> Tensor | None:
    """The values [outputs] float32 of a tensor [outputs, 1] or [outputs]; None: the tensor is missing."""
    if name not in tensors:
        return None
    shape = (outputs,) if len(tensors.shape(name)) == 1 else (outputs, 1)
    values = tensors.read(name, shape, STORED).flatten().float()
    check_finite(name, values)
    return values


def _refuse_offset(tensors: Tensors, name: str, outputs: int) -> None:
    offsets = _by_output(tensors, name, outputs)
    if offsets is not None and offsets.any():
        raise ModelRefused(f"{name} is not zero: int8 weights with offsets are not supported", "use a bf16 model")


def _number(tensors: Tensors, name: str) -> float:
    return float(tensors.read(name, (1,), (*STORED, "I8")).item())
