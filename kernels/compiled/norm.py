"""Norms (cpu/layers/norm.cpp, cuda/layers/norm.cu); kernels/ops/norm.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import norm as reference
from .arguments import FLOATS

_rms_norm = torch.ops.localllm.rms_norm.default
_add_rms_norm = torch.ops.localllm.add_rms_norm.default


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if not _supported(x, weight):
        return reference.rms_norm(x, weight, eps, offset)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _rms_norm(out, rows, weight, eps, offset)
    return out if rows.shape == x.shape else out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Overwrites `residual` with the sum x + residual."""
    writable = residual.dtype == x.dtype and residual.is_contiguous()
    if not writable or x.dim() != 2 or not _supported(x, weight):
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    rows = _rows(x)
    out = torch.empty_like(rows)
    _add_rms_norm(out, rows, residual, weight, eps, offset)
    return out, residual


def _supported(x: Tensor, weight: Tensor) -> bool:
    return {x.dtype, weight.dtype} <= FLOATS


def _rows(x: Tensor) -> Tensor:
    """x as [rows, dim], or as [rows, heads, dim] if that needs no copy. The rows may have any stride."""
    dim = x.shape[-1]
    dense = {2: (1,), 3: (dim, 1)}  # strides of a dense row, by the number of dimensions of x
    if x.stride()[1:] == dense.get(x.dim()):
        return x
    return x.reshape(-1, dim).contiguous()
