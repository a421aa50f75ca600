"""Norms (norm.cpp, norm.cu); kernels/ops/norm.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import norm as reference
from .arguments import FLOATS

_rms_norm = torch.ops.localllm.rms_norm.default
_add_rms_norm = torch.ops.localllm.add_rms_norm.default
_layer_norm = torch.ops.localllm.layer_norm.default


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if not {x.dtype, weight.dtype} <= FLOATS:
        return reference.rms_norm(x, weight, eps, offset)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _rms_norm(out, rows, weight, eps, offset)
    return out if rows.shape == x.shape else out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The sum is written over residual."""
    alike = residual.dtype == x.dtype and residual.is_contiguous()
    if not {x.dtype, weight.dtype} <= FLOATS or x.dim() != 2 or not alike:
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _add_rms_norm(out, rows, residual, weight, eps, offset)
    return out, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if not {x.dtype, weight.dtype} <= FLOATS or (bias is not None and bias.dtype != weight.dtype):
        return reference.layer_norm(x, weight, bias, eps)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _layer_norm(out, rows, weight, bias, eps)
    return out if rows.shape == x.shape else out.view(x.shape)


def _rows(x: Tensor) -> Tensor:
    """x as [rows, dim], or as [rows, heads, dim] if that needs no copy. The rows may have a stride."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()
