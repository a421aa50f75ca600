"""Attention over the paged cache in CUDA C++: decode (decode.cu) and prefill, with wgmma on Hopper
(prefill.py) or with mma.sync (prefill_mma.py). Triton computes all other cases, or the reference if
Triton is not installed."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...ops.attention import Rows
from ...triton.problem import triton_problem
from . import prefill, prefill_mma
from .prefill import TYPES, loads_aligned

if triton_problem():
    from ...ops.attention import paged_attention as fallback
else:
    from ...triton.attention import paged_attention as fallback

_decode = torch.ops.localllm.decode_attention.default

DIMS = (64, 80, 96, 128, 192, 256)
FP8 = torch.float8_e4m3fn
PREFILL = (prefill, prefill_mma)  # the fastest first
MAX_GROUP = 8  # largest number of query heads that share a kv head; as in decode.h
MAX_PAIRS = 1 << 16  # largest number of pairs of a row and a kv head


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: Rows,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See kernels/ops/attention.py. The kernels support 16-bit heads of the sizes DIMS, and a cache of that dtype or
    float8_e4m3fn. Concurrent calls on two streams are safe."""
    options = scale, window, soft_cap, sinks
    decodes = 1 in rows.query_lens and _supports_decode(query, key_pages, value_pages, rows)
    only_decode = decodes and max(rows.query_lens) == 1
    kernel = None if only_decode else _prefill_kernel(query, key_pages, value_pages, rows)
    if kernel is None and not only_decode:
        return fallback(query, key_pages, value_pages, rows, *options, out)
    out = query.new_empty(query.shape) if out is None else out
    if kernel is not None:
        kernel.prefill(out, query, key_pages, value_pages, rows, *options, min_queries=2 if decodes else 1)
    if decodes:
        tables = rows.row_starts, rows.context_lens, rows.page_table
        sinks = None if sinks is None else sinks.float()
        _decode(out, query, key_pages, value_pages, *tables, sinks, scale, window, soft_cap)
    return out


def _prefill_kernel(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> ModuleType | None:
    for kernel in PREFILL:
        if kernel.supports(query, key_pages, value_pages, rows):
            return kernel
    return None


def _supports_decode(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if the decode kernel, which computes the rows with one query, supports these tensors."""
    heads, dim = query.shape[1:]
    if query.dtype not in TYPES or dim not in DIMS or key_pages.dtype not in (query.dtype, FP8):
        return False
    size, kv_heads = key_pages.shape[1:3]
    power_of_two = size & (size - 1) == 0
    sizes = heads <= MAX_GROUP * kv_heads and len(rows.query_lens) * kv_heads <= MAX_PAIRS
    return sizes and power_of_two and loads_aligned(query, key_pages, value_pages)
