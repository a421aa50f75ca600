"""One case put to an implementation of its op and judged by the reference, for tests and for a device's self-test."""

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


def moved(value: Any, device: str, wide: bool = False) -> Any:
    """A fresh copy on the device; floats in float64 where wide."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64 if wide and value.is_floating_point() else value.dtype, copy=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: moved(getattr(value, name), device, wide) for name in fields})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device, wide) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(part, device, wide) for part in value)
    return value


def answer(case: Case, op: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    """What the op writes and what it returns."""
    returned = op(**arguments)
    answers = [returned] if isinstance(returned, Tensor) else list(returned or ())
    return [attrgetter(name)(SimpleNamespace(**arguments)) for name in case.mutates] + answers


def held(ops: Ops, value: Any, dtype: torch.dtype) -> Any:
    """A weight, or every weight of a layer or of many, as the device holds it."""
    if isinstance(value, tuple) and isinstance(value[0], DecoderLayer):
        return ops.layer.prepare_stack([held(ops, layer, dtype) for layer in value])
    if not isinstance(value, DecoderLayer):
        return ops.linear.pack(value, dtype)

    def packed(projection: Any) -> Any:
        return projection._replace(weight=ops.linear.pack(projection.weight, dtype))

    mlp = value.mlp
    if isinstance(mlp, GatedMlp):
        mlp = mlp._replace(gate_up=packed(mlp.gate_up), down=packed(mlp.down))
    layer = dataclasses.replace(value, qkv=packed(value.qkv), out=packed(value.out), mlp=mlp)
    return ops.layer.prepare(layer)


def given(case: Case, ops: Ops, arguments: Mapping[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The case's arguments on the device, as its ops hold them."""
    there = {name: moved(value, device) for name, value in arguments.items()}
    there |= {name: held(ops, there[name], dtype) for name in case.packs}
    return there | ({"ops": ops} if "ops" in there else {})


def asked(case: Case, reference: Any, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    """The case's arguments on the CPU, and the reference's answer in float64."""
    arguments = dict(case.make(torch.Generator().manual_seed(SEED), dtype))
    return arguments, answer(
        case, reference, {name: moved(value, "cpu", wide=True) for name, value in arguments.items()}
    )


def fault(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> str:
    """What is wrong with an answer, in a few words; empty: nothing. `tolerance`: of the largest magnitude expected."""
    if [one.shape for one in found] != [other.shape for other in expected]:
        return "answers in another shape"
    for own, other in zip(found, expected, strict=True):
        if not own.is_floating_point():
            if not torch.equal(own.cpu(), other):
                return "answers other numbers"
            continue
        one = own.cpu().double()
        if (one.isnan() & ~other.isnan()).any():
            return "answers NaN"
        scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1.0
        off = (one - other).abs()[one != other]  # infinities may be equal
        if not (off <= tolerance * max(scale, 1e-6)).all():
            return f"is off by {off.max().item():.2g} of {scale:.2g}"
    return ""
