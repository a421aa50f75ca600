"""Gated activations on GPUs without the CUDA library; kernels/ops/activation.py defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import activation as reference
from .target import supports

SPAN = 1024  # output elements of a program
_SILU, _GELU, _GELU_TANH = range(3)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _SILU) if supports(gate_up) else reference.silu_and_mul(gate_up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _GELU) if supports(gate_up) else reference.gelu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _GELU_TANH) if supports(gate_up) else reference.gelu_tanh_and_mul(gate_up)


def _launch(gate_up: Tensor, kind: int) -> Tensor:
    rows = gate_up if gate_up.dim() == 2 else gate_up.flatten(0, -2)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    dim = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], dim, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _gate[(len(rows), triton.cdiv(dim, SPAN))](out, rows, rows.stride(0), dim, KIND=kind, SPAN=SPAN)
    return out


@triton.jit
def _gate(out, x, stride, dim, KIND: tl.constexpr, SPAN: tl.constexpr):
    """Program (row, block) computes SPAN outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < dim
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + dim + column, mask=inside, other=0.0)
    if KIND == 0:
        factor = tl.sigmoid(gate)
    elif KIND == 1:
        factor = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # (1 + tanh y) / 2 is the sigmoid of 2 y
        factor = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * dim + column, (gate * factor * up.to(tl.float32)).to(up.dtype), mask=inside)
