"""Gated activations (Shazeer, "GLU variants improve transformer", 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
