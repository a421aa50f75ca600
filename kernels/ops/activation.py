"""Gated activations (Shazeer, "GLU variants improve transformer", 2020)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cases.case import Case, Make

SWIGLU_LIMIT = 7.0
SWIGLU_ALPHA = 1.702


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * dim], gates first -> silu(gate) * up [..., dim]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * dim], gates first -> gelu(gate) * up [..., dim], gelu by the error function."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * dim], gates first -> gelu(gate) * up [..., dim], gelu by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 * dim], gates first -> gate * sigmoid(1.702 * gate) * (up + 1) [..., dim]. Before that, gates are
    clamped to at most 7, and ups to -7…7."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)


@dataclass(frozen=True, slots=True)
class Activation:
    """The implementations of the gated activations on a device."""

    silu_and_mul: Callable[[Tensor], Tensor] = silu_and_mul
    gelu_and_mul: Callable[[Tensor], Tensor] = gelu_and_mul
    gelu_tanh_and_mul: Callable[[Tensor], Tensor] = gelu_tanh_and_mul
    clamped_swiglu_and_mul: Callable[[Tensor], Tensor] = clamped_swiglu_and_mul


def _inputs(shape: tuple[int, ...], scale: float = 1.0) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"gate_up": (torch.randn(shape, generator=generator) * scale).to(dtype)}

    return make


CASES = [
    Case(f"activation.{op}", label, make)
    for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu_and_mul")
    for label, make in [
        ("plain", _inputs((5, 128))),
        ("one-row", _inputs((1, 2048))),
        ("odd-width", _inputs((3, 62))),
        ("no-rows", _inputs((0, 64))),
        ("saturated", _inputs((4, 64), scale=50.0)),
    ]
]
