"""Writes to the paged cache on CUDA devices (kv.cu, append.cu). kernels/ops/kv.py has the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled import norm, rope
from ...compiled.arguments import FLOATS, ROTATIONS, has_dense_heads, heads_dense
from ...ops import kv as reference
from ...ops.kv import Rotation
from ...ops.norm import Norm
from ...ops.rope import Rope

__all__ = ["append", "copy_pages", "store"]

_store = torch.ops.localllm.store.default
_append = torch.ops.localllm.append.default
_copy_cache_pages = torch.ops.localllm.copy_cache_pages.default
CACHE_DTYPES = FLOATS | {torch.float8_e4m3fn}
MAX_DIM = 12288  # largest head dim of append.cu, which keeps a head in shared memory


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """See kernels/ops/kv.py. Tokens whose slot is not in the cache are not stored."""
    if key.dtype in FLOATS and key_pages.dtype in CACHE_DTYPES:
        _store(heads_dense(key), heads_dense(value), key_pages, value_pages, slots)
    else:
        reference.store(key, value, key_pages, value_pages, slots)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    _copy_cache_pages(pages, sources.contiguous(), targets.contiguous())


_composed = reference.composed(Norm(rms=norm.rms_norm), Rope(neox=rope.rope, interleaved=rope.interleaved_rope), store)


def append(
    qkv: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    offset: float,
    cos: Tensor,
    sin: Tensor,
    rotation: Rotation,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
) -> Tensor:
    """See kernels/ops/kv.py. Returns the queries, a view of `qkv`. Skips tokens whose slot is not in the cache."""
    if not _supported(qkv, query_norm, key_norm, key_pages):
        return _composed(qkv, query_norm, key_norm, eps, offset, cos, sin, rotation, slots, key_pages, value_pages)
    _append(qkv, query_norm, key_norm, eps, offset, cos, sin, ROTATIONS[rotation], slots, key_pages, value_pages)
    return qkv.narrow(1, 0, qkv.shape[1] - 2 * key_pages.shape[2])


def _supported(qkv: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, key_pages: Tensor) -> bool:
    """True if the kernel supports these tensors."""
    dtypes = qkv.dtype in FLOATS and key_pages.dtype in (qkv.dtype, torch.float8_e4m3fn)
    norm_dtypes = {norm.dtype for norm in (query_norm, key_norm) if norm is not None}
    return dtypes and len(norm_dtypes) < 2 and qkv.shape[2] <= MAX_DIM and has_dense_heads(qkv)
