"""Attention over paged and latent caches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
from shapes import Shape
from torch import Tensor
from torch.nn import functional as F

from localllm.kernels.ops.attention import Attend, Rows, latent_attention

from .work import Arguments, Work, randn

PAGE = 16
LATENT = 16, 64, 512  # heads, rotary dimension and rank of DeepSeek-V2-Lite


def attention(shape: Shape, dtype: torch.dtype) -> Iterator[Work]:
    """Decode of 1 and of 16 rows, prefill, and the last chunk of a long prefill."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    for rows, queries, context in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 128, 4096)):
        yield Work(
            "attention.paged",
            f"{rows} rows of {queries} after {context - queries}, {heads}/{kv_heads} heads of {dim}",
            partial(_paged, dtype, rows, queries, context, heads, kv_heads, dim),
            dtype.itemsize * dim * rows * (2 * kv_heads * context + 2 * heads * queries),
            _contiguous,
            4.0 * rows * heads * dim * _scores(queries, context),
        )


def latent(dtype: torch.dtype) -> Iterator[Work]:
    """Latent attention has many operations per byte, because all heads read the same keys."""
    heads, rotary, rank = LATENT
    dim = rotary + rank
    for rows, queries, context in ((1, 1, 1024), (8, 1, 1024), (1, 1, 8192), (1, 512, 512)):
        yield Work(
            "attention.latent",
            f"{rows} rows of {queries} after {context - queries}, {heads} heads of {rotary} + {rank}",
            partial(_latent, dtype, rows, queries, context, heads, rotary, dim),
            dtype.itemsize * rows * (dim * context + (dim + rank) * heads * queries),
            latent_attention,
            2.0 * rows * heads * (dim + rank) * _scores(queries, context),
        )


def _scores(queries: int, context: int) -> float:
    """The number of scores of a head in one row."""
    return queries * (context - queries) + queries * (queries + 1) / 2


def _latent(dtype: torch.dtype, rows: int, queries: int, context: int, heads: int, rotary: int, dim: int) -> Arguments:
    arguments = _paged(dtype, rows, queries, context, heads, 1, dim)
    arguments["rows"].groups(PAGE, 0)  # the reference computes them once for all layers of a step
    query, attend = arguments["query"], arguments["attend"]
    return {
        "query": query,
        "pages": (attend.key_pages,),
        "rows": arguments["rows"],
        "scale": attend.scale,
        "start": rotary,
    }


def _paged(dtype: torch.dtype, rows: int, queries: int, context: int, heads: int, kv_heads: int, dim: int) -> Arguments:
    pages = -(-context // PAGE)
    table = (torch.randperm(rows * pages) + 1).to(torch.int32).view(rows, pages)
    cache = randn(dtype, 2, rows * pages + 1, PAGE, kv_heads, dim)
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    contexts = torch.full((rows,), context, dtype=torch.int32)
    return {
        "query": randn(dtype, rows * queries, heads, dim),
        "rows": Rows(starts, contexts, table, (queries,) * rows, (context,) * rows),
        "attend": Attend(cache[0], cache[1], dim**-0.5),
    }


def _contiguous(query: Tensor, rows: Rows, attend: Attend) -> Tensor:
    """torch's attention, on contiguous keys and values instead of pages."""
    count, queries, context = len(rows.contexts), rows.query_lens[0], rows.contexts[0]
    by_row = query.view(count, queries, -1, query.shape[-1]).transpose(1, 2)
    keys, values = (pages[1:].reshape(count, -1, *pages.shape[2:])[:, :context] for pages in attend[:2])
    mask = _mask(queries, context, query.device) if 1 < queries < context else None
    options = {"attn_mask": mask, "is_causal": 1 < queries == context, "scale": attend.scale, "enable_gqa": True}
    return F.scaled_dot_product_attention(by_row, keys.transpose(1, 2), values.transpose(1, 2), **options)


@lru_cache(maxsize=1)
def _mask(queries: int, context: int, device: torch.device) -> Tensor:
    return torch.ones(queries, context, dtype=torch.bool, device=device).tril(context - queries)
