"""Attention over the paged cache: decode in CUDA C++ (attention.cu), which is faster than Triton, and prefill on Hopper
(attention_extend.py). Triton computes all other cases, or the reference if Triton is not installed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gpu_properties import gpu_properties
from ..ops.attention import Rows
from ..triton_problem import triton_problem
from .attention_extend import extend, loads_aligned
from .attention_extend import supports as supports_prefill

if triton_problem():
    from ..ops.attention import paged_attention as fallback
else:
    from ..triton.attention import paged_attention as fallback

_decode = torch.ops.localllm.decode_attention.default

CONVERTING = (8, 9)  # the lowest compute capability with float8_e4m3fn conversion in hardware
DIMS = (64, 128)
FP8_DIM = 128  # the only head dim for an fp8 cache; head dim 64 is not tested on a GPU
TYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8  # largest number of query heads that share a kv head; as in attention.h
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
    """See kernels/ops/attention.py. The kernels support 16-bit heads of dim 64 or 128. Concurrent calls on two streams
    are safe."""
    options = scale, window, soft_cap, sinks
    decodes = 1 in rows.query_lens and _supports_decode(query, key_pages, value_pages, rows)
    prefills = supports_prefill(query, key_pages, value_pages, rows)
    only_decode = decodes and max(rows.query_lens) == 1
    if not prefills and not only_decode:
        return fallback(query, key_pages, value_pages, rows, *options, out)
    out = query.new_empty(query.shape) if out is None else out
    if prefills:
        extend(out, query, key_pages, value_pages, rows, *options, min_queries=2 if decodes else 1)
    if decodes:
        tables = rows.row_starts, rows.context_lens, rows.page_table
        sinks = None if sinks is None else sinks.float()
        _decode(out, query, key_pages, value_pages, *tables, sinks, scale, window, soft_cap)
    return out


def _supports_decode(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if the decode kernel, which computes the rows with one query, supports these tensors."""
    heads, dim = query.shape[1:]
    if query.dtype not in TYPES or dim not in DIMS or not _supports_cache(key_pages, query.dtype, dim):
        return False
    size, kv_heads = key_pages.shape[1:3]
    power_of_two = size & (size - 1) == 0
    sizes = heads <= MAX_GROUP * kv_heads and len(rows.query_lens) * kv_heads <= MAX_PAIRS
    return sizes and power_of_two and loads_aligned(query, key_pages, value_pages)


def _supports_cache(pages: Tensor, dtype: torch.dtype, dim: int) -> bool:
    if pages.dtype == dtype:
        return True
    fp8 = pages.dtype == torch.float8_e4m3fn and dim == FP8_DIM
    return fp8 and gpu_properties(pages.device).capability >= CONVERTING
