"""Gated activations (activation.cpp, activation.cu); kernels/ops/activation.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import activation as reference
from .arguments import FLOATS

_gate = torch.ops.localllm.gate.default
_SILU, _GELU, _GELU_TANH = range(3)  # Activation in kernels.h


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, _SILU) if gate_up.dtype in FLOATS else reference.silu_and_mul(gate_up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, _GELU) if gate_up.dtype in FLOATS else reference.gelu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, _GELU_TANH) if gate_up.dtype in FLOATS else reference.gelu_tanh_and_mul(gate_up)


def _gated(gate_up: Tensor, kind: int) -> Tensor:
    width = gate_up.shape[-1]
    rows = gate_up if gate_up.dim() == 2 and gate_up.stride(1) == 1 else gate_up.reshape(-1, width).contiguous()
    out = rows.new_empty((rows.shape[0], width // 2))
    _gate(out, rows, kind)
    return out if gate_up.dim() == 2 else out.view(*gate_up.shape[:-1], width // 2)
