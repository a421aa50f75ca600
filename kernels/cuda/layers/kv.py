"""Writes to the paged cache on CUDA devices (kv.cu, append.cu). kernels/ops/kv.py has the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled import kv as compiled
from ...compiled.arguments import FLOATS, has_dense_heads
from ...compiled.ops import NORM, ROPE
from ...ops import kv as reference
from ...ops.kv import Append

_copy_cache_pages = torch.ops.localllm.copy_cache_pages.default
CACHE_DTYPES = FLOATS | {torch.float8_e4m3fn}
MAX_DIM = 12288  # largest head dim of append.cu, which keeps a head in shared memory


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """See kernels/ops/kv.py. Tokens whose slot is not in the cache are not stored."""
    if key.dtype in FLOATS and key_pages.dtype in CACHE_DTYPES:
        compiled.store(key, value, key_pages, value_pages, slots)
    else:
        reference.store(key, value, key_pages, value_pages, slots)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    _copy_cache_pages(pages, sources.contiguous(), targets.contiguous())


_composed = reference.composed(NORM, ROPE, store)


def append(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
    """See kernels/ops/kv.py. Returns the queries, a view of `qkv`. Skips tokens whose slot is not in the cache."""
    kernel = compiled.append if _supported(qkv, target) else _composed
    return kernel(qkv, cos, sin, slots, target)


def _supported(qkv: Tensor, target: Append) -> bool:
    """True if the kernel supports these tensors."""
    dtypes = qkv.dtype in FLOATS and target.key_pages.dtype in (qkv.dtype, torch.float8_e4m3fn)
    norm_dtypes = {norm.dtype for norm in (target.query_norm, target.key_norm) if norm is not None}
    return dtypes and len(norm_dtypes) < 2 and qkv.shape[2] <= MAX_DIM and has_dense_heads(qkv)
