"""Norms on GPUs without the CUDA library; kernels/ops/norm.py defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import norm as reference
from .target import supports

MAX_DIM = 8192  # largest dim: a program keeps a row in registers


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    if not _supported(x):
        return reference.rms_norm(x, weight, eps, offset)
    return _launch(x, None, weight, eps, offset)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Overwrites `residual` with the sum x + residual."""
    writable = residual.is_contiguous() and residual.dtype == x.dtype
    if not writable or x.dim() != 2 or not _supported(x):
        return reference.add_rms_norm(x, residual, weight, eps, offset)
    return _launch(x, residual, weight, eps, offset), residual


def _supported(x: Tensor) -> bool:
    return supports(x) and x.shape[-1] <= MAX_DIM and x.stride(-1) == 1


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
    rows = x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])
    heads = rows.shape[1] if rows.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    if out.numel():
        _normalise[(out.numel() // dim,)](
            out, rows, residual, weight, heads, rows.stride(0), rows.stride(1), dim, eps, offset,
            DIM=triton.next_power_of_2(dim), num_warps=_warps(dim),
        )  # fmt: skip
    return out


def _warps(dim: int) -> int:
    """Warps of a program: eight elements per thread, at most 16 warps."""
    return min(16, max(1, int(triton.next_power_of_2(dim)) // 256))


@triton.jit
def _normalise(
    out, x, residual, weight, heads, row_stride, head_stride, dim, eps, offset, DIM: tl.constexpr
):  # fmt: skip
    """One program per row, or per head of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DIM)
    inside = column < dim
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    values = tl.load(x + row // heads * row_stride + row % heads * head_stride + column, mask=inside, other=0.0)
    if residual is not None:
        to_residual = residual + row * dim + column
        total = values.to(tl.float32) + tl.load(to_residual, mask=inside, other=0.0).to(tl.float32)
        values = total.to(values.dtype)  # normalise the rounded sum, as it is stored in the residual stream
        tl.store(to_residual, values, mask=inside)
    wide = values.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps) * scales
    tl.store(out + row * dim + column, wide.to(values.dtype), mask=inside)
