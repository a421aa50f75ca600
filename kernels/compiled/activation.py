"""Gated activations (activation.cpp, activation.cu); kernels/ops/activation.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import activation as reference
from .arguments import FLOATS, GATES

_gate = torch.ops.localllm.gate.default


def silu_and_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype not in FLOATS:
        return reference.silu_and_mul(gate_up)
    return _gated(gate_up, GATES["silu_and_mul"])


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype not in FLOATS:
        return reference.gelu_and_mul(gate_up)
    return _gated(gate_up, GATES["gelu_and_mul"])


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    if gate_up.dtype not in FLOATS:
        return reference.gelu_tanh_and_mul(gate_up)
    return _gated(gate_up, GATES["gelu_tanh_and_mul"])


def _gated(gate_up: Tensor, kind: int) -> Tensor:
    width = gate_up.shape[-1]
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty((rows.shape[0], width // 2))
    _gate(out, rows, kind)
    return out if gate_up.dim() == 2 else out.view(*gate_up.shape[:-1], width // 2)
