"""Attention over the paged cache: decode in CUDA C++ (attention.cu), which is faster than Triton, and prefill on Hopper
(attention_extend.py). Triton, or else the reference, computes all other cases."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ..ops.attention import Rows
from .attention_extend import extend, serves

if find_spec("triton"):
    from ..triton.attention import paged_attention as fallback
else:
    from ..ops.attention import paged_attention as fallback

_decode = torch.ops.localllm.decode_attention.default

CONVERTING = (8, 9)  # the lowest compute capability with float8_e4m3fn conversion in hardware
DIMS = (64, 128)
FP8_DIM = 128  # the only dim for an fp8 cache; dim 64 is not tested on a GPU
TYPES = (torch.bfloat16, torch.float16)
MOST_SHARING = 8  # as in attention.h
MOST_PAIRS = 1 << 16


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
    """See kernels/ops/attention.py. Kernels for 16-bit heads of dim 64 or 128. Two streams may call it concurrently."""
    options = scale, window, soft_cap, sinks
    decodes = 1 in rows.query_lens and _covered(
        query, key_pages, value_pages, rows
    )  # decode kernel: rows with one query
    prefills = serves(query, key_pages, value_pages, rows)
    if not prefills and not (decodes and max(rows.query_lens) == 1):
        return fallback(query, key_pages, value_pages, rows, *options, out)
    out = query.new_empty(query.shape) if out is None else out
    if prefills:
        extend(out, query, key_pages, value_pages, rows, *options, fewest=2 if decodes else 1)
    if decodes:
        starts = rows.row_starts
        contexts = rows.context_lens
        table = rows.page_table
        sinks = None if sinks is None else sinks.float()
        _decode(out, query, key_pages, value_pages, starts, contexts, table, sinks, scale, window, soft_cap)
    return out


def _converts(pages: Tensor) -> bool:
    return pages.dtype == torch.float8_e4m3fn and _capability(pages.device) >= CONVERTING


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _covered(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if the decode kernel supports these tensors, for rows with one query."""
    heads, dim = query.shape[1:]
    size, kv_heads = key_pages.shape[1:3]
    token, head, _ = query.stride()
    page, slot, cache_head, one = key_pages.stride()
    return (
        query.dtype in TYPES
        and dim in DIMS
        and (key_pages.dtype == query.dtype or (dim == FP8_DIM and _converts(key_pages)))
        and heads <= MOST_SHARING * kv_heads
        and len(rows.query_lens) * kv_heads <= MOST_PAIRS
        and size & (size - 1) == 0
        and query.stride(2) == one == 1
        and page == slot * size
        and value_pages.stride() == key_pages.stride()
        and not any(stride % 8 for stride in (token, head, slot, cache_head))
        and not any(tensor.data_ptr() % 16 for tensor in (query, key_pages, value_pages))
    )
