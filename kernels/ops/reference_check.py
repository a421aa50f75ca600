"""Runs a case on an implementation and compares it with the reference, for tests and for a device's self-test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .layer import DecoderLayer
from .mlp import GatedMlp

if TYPE_CHECKING:
    from . import Ops
    from .case import Case

SEED = 7


def copy_to(value: Any, device: str, wide: bool = False) -> Any:
    """A copy of the value, with all its tensors on the device. `wide`: float tensors become float64."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64 if wide and value.is_floating_point() else value.dtype, copy=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: copy_to(getattr(value, name), device, wide) for name in fields})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_to(part, device, wide) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(copy_to(part, device, wide) for part in value)
    return value


def call_op(case: Case, op: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """The outputs of a call: the arguments that the op writes, then the tensors that it returns."""
    result = op(**arguments)
    returned = [result] if isinstance(result, Tensor) else list(result or ())
    namespace = SimpleNamespace(**arguments)
    written = [attrgetter(name)(namespace) for name in case.mutates]
    return written + returned


def pack_value(ops: Ops, value: Any, dtype: torch.dtype) -> Any:
    """The value after packing and preparation by the device; it is a weight, a layer or a tuple of layers."""
    if isinstance(value, tuple) and isinstance(value[0], DecoderLayer):
        return ops.layer.prepare_stack([pack_value(ops, layer, dtype) for layer in value])
    if not isinstance(value, DecoderLayer):
        return ops.linear.pack(value, dtype)

    def packed(projection: Any) -> Any:
        return projection._replace(weight=ops.linear.pack(projection.weight, dtype))

    mlp = value.mlp
    if isinstance(mlp, GatedMlp):
        mlp = mlp._replace(gate_up=packed(mlp.gate_up), down=packed(mlp.down))
    layer = dataclasses.replace(value, qkv=packed(value.qkv), out=packed(value.out), mlp=mlp)
    return ops.layer.prepare(layer)


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


def mismatch(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """The fault of the outputs `found`, as the end of a sentence; empty if there is none.

    `tolerance`: the largest difference allowed, as a fraction of the largest magnitude expected.
    """
    if [output.shape for output in found] != [target.shape for target in expected]:
        return "returns the wrong shape"
    for output, target in zip(found, expected, strict=True):
        if not output.is_floating_point():
            if not torch.equal(output.cpu(), target):
                return "returns wrong integers"
            continue
        value = output.cpu().double()
        if (value.isnan() & ~target.isnan()).any():
            return "returns NaN"
        scale = target[target.isfinite()].abs().max().item() if target.isfinite().any() else 1.0
        error = (value - target).abs()[value != target]  # equal infinities have no difference
        if not (error <= tolerance * max(scale, 1e-6)).all():
            return f"is off by {error.max().item():.2g} of {scale:.2g}"
    return ""
