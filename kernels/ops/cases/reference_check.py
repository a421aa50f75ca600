"""Runs an implementation of an op on a test case and compares its outputs with those of the reference.

Tests and the self-test of a device use this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layer import DecoderLayer
from ..lora import Adapted
from ..mla import LatentInputs, LatentOutputs
from ..mlp import Experts, GatedMlp
from ..moe import ExpertWeights
from ..projection import Product

if TYPE_CHECKING:
    from .. import Ops
    from .case import Case

SEED = 7


def copy_to(value: Any, device: str, wide: bool = False) -> Any:
    """A copy of the value, with all its tensors on the device. `wide`: float tensors become float64."""

    def copy(member: Any) -> Any:
        return copy_to(member, device, wide)

    if isinstance(value, Tensor):
        to_float64 = wide and value.is_floating_point()
        return value.to(device, torch.float64 if to_float64 else value.dtype, copy=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: copy(getattr(value, name)) for name in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy, value))
    if isinstance(value, tuple | list):
        return type(value)(map(copy, value))
    return value


def call_op(case: Case, op: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The outputs of a call: the arguments that the op writes, then the tensors that it returns."""
    result = op(**arguments)
    returned = [result] if isinstance(result, Tensor) else list(result or ())
    namespace = SimpleNamespace(**arguments)
    written: list[Tensor] = []
    for name in case.mutates:
        value = attrgetter(name)(namespace)
        written += [value] if isinstance(value, Tensor) else value
    return written + returned


def pack_value(ops: Ops, value: Any, dtype: torch.dtype) -> Any:
    """A weight, a product, the weights of experts, a layer or a tuple of layers, packed and prepared by `ops`."""
    match value:
        case DecoderLayer():
            return ops.layer.prepare(_pack_layer(ops, value, dtype))
        case (DecoderLayer(), *_):
            return ops.layer.prepare_stack([pack_value(ops, layer, dtype) for layer in value])
        case Product():
            return value._replace(weight=ops.linear.pack(value.weight, dtype))
        case ExpertWeights():
            return ops.moe.pack(value, dtype)
    return ops.linear.pack(value, dtype)


def _pack_layer(ops: Ops, layer: DecoderLayer, dtype: torch.dtype) -> DecoderLayer:
    def packed(projection: Any) -> Any:
        match projection:
            case None:
                return None
            case Adapted():
                return projection._replace(base=packed(projection.base))
            case LatentInputs():
                return projection._replace(down=packed(projection.down), queries=packed(projection.queries))
            case LatentOutputs():
                return projection._replace(out=packed(projection.out))
        return pack_value(ops, projection, dtype)

    def packed_mlp(mlp: Any) -> Any:
        match mlp:
            case GatedMlp():
                return mlp._replace(gate_up=packed(mlp.gate_up), down=packed(mlp.down))
            case Experts():
                weights = pack_value(ops, mlp.weights, dtype)
                shared_gate = None if mlp.shared_gate is None else packed(mlp.shared_gate)
                shared = packed_mlp(mlp.shared)
                return mlp._replace(router=packed(mlp.router), weights=weights, shared=shared, shared_gate=shared_gate)
        return mlp

    return dataclasses.replace(layer, qkv=packed(layer.qkv), out=packed(layer.out), mlp=packed_mlp(layer.mlp))


def device_arguments(
    case: Case, ops: Ops, arguments: Mapping[str, Any], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """The case's arguments on the device, with packed weights and prepared layers."""
    on_device = {name: copy_to(value, device) for name, value in arguments.items()}
    for name in case.packs:
        on_device[name] = pack_value(ops, on_device[name], dtype)
    if "ops" in on_device:
        on_device["ops"] = ops
    return on_device


def reference_run(case: Case, reference: Any, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    """The case's arguments on the CPU in `dtype`, and the outputs of the reference in float64."""
    arguments = dict(case.make(torch.Generator().manual_seed(SEED), dtype))
    wide = {name: copy_to(value, "cpu", wide=True) for name, value in arguments.items()}
    return arguments, call_op(case, reference, wide)


def mismatch(outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """The end of an error message that says how an op's outputs differ from the expected outputs, such as
    "returns NaN"; empty if they are equal within the tolerance.

    `tolerance`: the largest difference allowed, as a fraction of the largest magnitude expected.
    """
    if [output.shape for output in outputs] != [target.shape for target in expected]:
        return "returns the wrong shape"
    for output, target in zip(outputs, expected, strict=True):
        difference = _difference(output.cpu(), target, tolerance)
        if difference:
            return difference
    return ""


def _difference(output: Tensor, target: Tensor, tolerance: float) -> str:
    if not output.is_floating_point():
        return "" if torch.equal(output, target) else "returns wrong integers"
    value = output.double()
    if (value.isnan() & ~target.isnan()).any():
        return "returns NaN"
    finite = target[target.isfinite()]
    scale = finite.abs().max().item() if len(finite) else 1.0
    error = (value - target).abs()[value != target]  # the difference of equal infinities would be NaN
    if (error <= tolerance * max(scale, 1e-6)).all():
        return ""
    return f"is off by {error.max().item():.2g} of {scale:.2g}"
