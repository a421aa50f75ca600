"""Rotary position embedding on GPUs without the CUDA library; kernels/ops/rope.py defines it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import rope as reference
from .target import supports


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not _supported(query, key, cos, sin):
        return reference.rope(query, key, cos, sin)
    return _launch(query, cos, sin, neox=True), _launch(key, cos, sin, neox=True)


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not _supported(query, key, cos, sin):
        return reference.interleaved_rope(query, key, cos, sin)
    return _launch(query, cos, sin, neox=False), _launch(key, cos, sin, neox=False)


def _supported(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    tables = cos.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    dense_heads = query.stride(2) == key.stride(2) == 1
    return tables and dense_heads and supports(query) and supports(key)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, neox: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, dim = x.shape
    if out.numel():
        _rotate[(tokens, heads)](
            out, x, cos, sin, x.stride(0), x.stride(1), heads, dim, cos.shape[1],
            NEOX=neox, DIM=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def partner(index, half, NEOX: tl.constexpr):
    """For the dimensions `index` of a head: (other dimension of the pair, index of the angle, sign of the sine, mask of
    the rotary dimensions)."""
    if NEOX:
        other = tl.where(index < half, index + half, index - half)
        angle = tl.where(index < half, index, index - half)
        sign = tl.where(index < half, -1.0, 1.0)
    else:
        other = index ^ 1
        angle = index // 2
        sign = tl.where(index % 2 == 0, -1.0, 1.0)
    return other, angle, sign, index < 2 * half


@triton.jit
def _rotate(out, x, cos, sin, token_stride, head_stride, heads, dim, half, NEOX: tl.constexpr, DIM: tl.constexpr):
    """Program (token, head) rotates one head of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    index = tl.arange(0, DIM)
    other, angle, sign, rotary = partner(index, half, NEOX)
    start = x + token * token_stride + head * head_stride
    values = tl.load(start + index, mask=index < dim)
    others = tl.load(start + other, mask=rotary, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * half + angle, mask=rotary, other=1.0)
    sine = tl.load(sin + token * half + angle, mask=rotary, other=0.0)
    result = values.to(tl.float32) * cosine + others * sine * sign
    tl.store(out + (token * heads + head) * dim + index, result.to(values.dtype), mask=index < dim)
