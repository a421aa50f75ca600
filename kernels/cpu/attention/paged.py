"""Attention over the paged cache (paged.cpp); kernels/ops/attention.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS, attention_arguments, has_dense_heads
from ...ops import attention as reference
from ...ops.attention import Attend, Rows

_attention = torch.ops.localllm.attention.default
_latent_attention = torch.ops.localllm.latent_attention.default


def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """Queries and cache may have different dtypes. Queries may be a view of a fused qkv projection."""
    if not {query.dtype, attend.key_pages.dtype} <= FLOATS:
        return reference.paged_attention(query, rows, attend, out)
    query = query if has_dense_heads(query) else query.contiguous()
    out = query.new_empty(query.shape) if out is None else out
    _attention(out, query, *attention_arguments(rows, attend))
    return out


def latent_attention(
    query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int, out: Tensor | None = None
) -> Tensor:
    """Queries and cache may have different dtypes. Tokens of the query may have any stride. Pages in two parts have the
    reference."""
    keys, *others = pages
    if others or not {query.dtype, keys.dtype} <= FLOATS:
        return reference.latent_attention(query, pages, rows, scale, start, out)
    query = query if has_dense_heads(query) else query.contiguous()
    out = query.new_empty(*query.shape[:2], query.shape[2] - start) if out is None else out
    _latent_attention(out, query, keys, rows.row_starts, rows.context_lens, rows.page_table, scale, start)
    return out
