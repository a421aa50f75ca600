"""Attention over the paged cache (attention.cpp); kernels/ops/attention.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..elements.arguments import FLOATS
from ..ops import attention as reference
from ..ops.attention import Rows

_attention = torch.ops.localllm.attention.default


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
    """Queries and cache may have different dtypes. Queries may be a view of a fused qkv projection."""
    if query.dtype not in FLOATS or key_pages.dtype not in FLOATS:
        return reference.paged_attention(query, key_pages, value_pages, rows, scale, window, soft_cap, sinks, out)
    if query.stride(2) != 1 or (query.shape[1] > 1 and query.stride(1) != query.shape[2]):
        query = query.contiguous()
    if sinks is not None:
        sinks = sinks.float()
    out = query.new_empty(query.shape) if out is None else out
    starts = rows.row_starts
    contexts = rows.context_lens
    pages = rows.page_table
    _attention(out, query, key_pages, value_pages, starts, contexts, pages, sinks, scale, window, soft_cap)
    return out
