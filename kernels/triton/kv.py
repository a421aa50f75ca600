"""Writes to the paged cache on GPUs without the CUDA library; kernels/ops/kv.py defines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import kv as reference
from ..ops.kv import Append, Rotation
from .rope import partner
from .target import FLOATS, device_properties


def append(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
    """Keys and values of a token are not written if its slot lies outside of the cache."""
    dense = qkv.stride(2) == 1 and all(tensor.is_contiguous() for tensor in (cos, sin, slots))
    dtypes = qkv.dtype in FLOATS and cos.dtype == torch.float32 and _converts(target.key_pages)
    if not dense or not dtypes:
        return reference.append(qkv, cos, sin, slots, target)
    tokens, qkv_heads, dim = qkv.shape
    heads = qkv_heads - 2 * target.kv_heads
    query = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _append[(tokens, qkv_heads)](
            query, qkv, target.query_norm, target.key_norm, cos, sin, slots, target.key_pages, target.value_pages,
            qkv.stride(0), qkv.stride(1), heads, target.kv_heads, dim, cos.shape[1],
            target.key_pages.shape[0] * target.key_pages.shape[1], target.eps, target.offset,
            NEOX=target.rotation == "neox", DIM=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return query


def append_latent(
    heads: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, slots: Tensor, pages: tuple[Tensor, ...]
) -> Tensor:
    """A key is not written if its slot lies outside of the cache. Pages in two parts have the reference."""
    keys, *others = pages
    dense = heads.stride(2) == 1 and all(tensor.is_contiguous() for tensor in (cos, sin, slots))
    dtypes = heads.dtype in FLOATS and cos.dtype == torch.float32 and keys.dtype in FLOATS
    if others or not dense or not dtypes:
        return reference.append_latent(heads, cos, sin, rotation, slots, pages)
    tokens, all_heads, dim = heads.shape
    query = torch.empty(tokens, all_heads - 1, dim, dtype=heads.dtype, device=heads.device)
    if tokens:
        _append[(tokens, all_heads)](
            query, heads, None, None, cos, sin, slots, keys, keys,
            heads.stride(0), heads.stride(1), all_heads - 1, 1, dim, cos.shape[1],
            keys.shape[0] * keys.shape[1], 0.0, 0.0,
            NEOX=rotation == "neox", DIM=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return query


def _converts(pages: Tensor) -> bool:
    """True if Triton on this device converts floats to the dtype of the pages."""
    return pages.dtype in FLOATS or pages.dtype == device_properties(pages.device).target.fp8


@triton.jit
def _append(
    query, qkv, query_norm, key_norm, cos, sin, slots, key_pages, value_pages,
    token_stride, head_stride, heads, kv_heads, dim, half, limit, eps, offset,
    NEOX: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Program (token, head); the heads are in the order of qkv: queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    index = tl.arange(0, DIM)
    inside = index < dim
    start = qkv + token * token_stride + head * head_stride
    values = tl.load(start + index, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    slot = tl.load(slots + token)
    stored = inside & (slot >= 0) & (slot < limit)
    if head >= heads + kv_heads:
        into = value_pages + (slot * kv_heads + head - heads - kv_heads) * dim + index
        tl.store(into, _as(wide, value_pages.dtype.element_ty), mask=stored)
    else:
        other, angle, sign, rotary = partner(index, half, NEOX)
        others = tl.load(start + other, mask=rotary, other=0.0).to(tl.float32)
        if query_norm is not None:
            norm = query_norm
            if head >= heads:
                norm = key_norm
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / dim + eps)
            wide *= scale * (tl.load(norm + index, mask=inside, other=0.0).to(tl.float32) + offset)
            others *= scale * (tl.load(norm + other, mask=rotary, other=0.0).to(tl.float32) + offset)
        cosine = tl.load(cos + token * half + angle, mask=rotary, other=1.0)
        sine = tl.load(sin + token * half + angle, mask=rotary, other=0.0)
        wide = wide * cosine + others * sine * sign
        if head < heads:
            tl.store(query + (token * heads + head) * dim + index, wide.to(values.dtype), mask=inside)
        else:
            into = key_pages + (slot * kv_heads + head - heads) * dim + index
            tl.store(into, _as(wide, key_pages.dtype.element_ty), mask=stored)


@triton.jit
def _as(x, dtype: tl.constexpr):
    """`x` (float32) converted to `dtype`; for float8, clamped to the range of float8 first."""
    if dtype == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    elif dtype == tl.float8e4b8:
        x = tl.minimum(tl.maximum(x, -240.0), 240.0)
    return x.to(dtype)
