"""Gated activations (cpu/layers/activation.cpp, cuda/layers/activation.cu); kernels/ops/activation.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import activation as reference
from .arguments import FLOATS, GATES

_gate = torch.ops.localllm.gate.default


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, "silu_and_mul")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, "gelu_and_mul")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, "gelu_tanh_and_mul")


def _gated(gate_up: Tensor, name: str) -> Tensor:
    if gate_up.dtype not in FLOATS:
        result: Tensor = getattr(reference, name)(gate_up)
        return result
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = rows.new_empty((rows.shape[0], rows.shape[1] // 2))
    _gate(out, rows, GATES[name])
    return out.view(*gate_up.shape[:-1], out.shape[1])
