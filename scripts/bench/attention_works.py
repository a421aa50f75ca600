"""Benchmarks of attention over paged and latent caches. Decode is bound by reads of the cache, prefill by arithmetic.

Latent attention has many operations per byte, because all heads read the same keys: arithmetic may bind its decode too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from work import Work

from localllm.kernels.ops.attention import Rows, latent_attention

PAGE = 16


def works(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Iterator[Work]:
    """A `Work` for decode of 1 row and of 16 rows, for a prefill, and for the last chunk of a long prefill."""
    for rows, queries, context in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 128, 4096)):
        scores = _scores(queries, context)
        yield Work(
            op="attention.paged",
            label=f"{rows} rows of {queries} after {context - queries}, {heads}/{kv_heads} heads of {dim}",
            make=partial(_arguments, rows, queries, context, heads, kv_heads, dim, dtype),
            bytes=dtype.itemsize * dim * rows * (2 * kv_heads * context + 2 * heads * queries),
            reference=_attention,
            operations=4.0 * rows * heads * dim * scores,
            kinds=_kinds(dtype),
            dtype=dtype,
        )


def latent_works(heads: int, rotary: int, rank: int, dtype: torch.dtype) -> Iterator[Work]:
    """A `Work` for decode of 1 row and of 8 rows, and for a prefill. The reference is that of kernels/ops."""
    for rows, queries, context in ((1, 1, 1024), (8, 1, 1024), (1, 1, 8192), (1, 512, 512)):
        dim = rotary + rank
        yield Work(
            op="attention.latent",
            label=f"{rows} rows of {queries} after {context - queries}, {heads} heads of {rotary} + {rank}",
            make=partial(_latent_arguments, rows, queries, context, heads, rotary, dim, dtype),
            bytes=dtype.itemsize * rows * (dim * context + (dim + rank) * heads * queries),
            reference=latent_attention,
            operations=2.0 * rows * heads * (dim + rank) * _scores(queries, context),
            kinds=_kinds(dtype),
            dtype=dtype,
        )


def _scores(queries: int, context: int) -> float:
    """The number of scores of a head in one row."""
    return queries * (context - queries) + queries * (queries + 1) / 2


def _kinds(dtype: torch.dtype) -> tuple[str, ...]:
    return ("f32", "bf16", "tile_bf16") if dtype == torch.bfloat16 else ("f32",)


def _latent_arguments(
    rows: int, queries: int, context: int, heads: int, rotary: int, dim: int, dtype: torch.dtype
) -> Mapping[str, Any]:
    arguments = _arguments(rows, queries, context, heads, 1, dim, dtype)
    names = "query", "rows", "scale"
    arguments["rows"].groups(PAGE, 0)  # the reference computes them once for all layers of a step
    return {"pages": arguments["key_pages"], "start": rotary, **{name: arguments[name] for name in names}}


def _arguments(
    rows: int, queries: int, context: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> Mapping[str, Any]:
    pages = -(-context // PAGE)
    table = (torch.randperm(rows * pages) + 1).to(torch.int32).view(rows, pages)
    cache = torch.randn(2, rows * pages + 1, PAGE, kv_heads, dim).to(dtype)
    starts = torch.arange(rows + 1, dtype=torch.int32) * queries
    contexts = torch.full((rows,), context, dtype=torch.int32)
    return {
        "query": torch.randn(rows * queries, heads, dim).to(dtype),
        "key_pages": cache[0],
        "value_pages": cache[1],
        "rows": Rows(starts, contexts, table, (queries,) * rows, (context,) * rows),
        "scale": dim**-0.5,
    }


def _attention(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows, scale: float) -> Tensor:
    """torch's attention, on contiguous keys and values instead of pages."""
    count = len(rows.contexts)
    queries = rows.query_lens[0]
    context = rows.contexts[0]
    kv_heads, dim = key_pages.shape[2:]
    by_row = query.view(count, queries, -1, dim).transpose(1, 2)
    mask = None
    if 1 < queries < context:
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    keys, values = _contiguous(count, kv_heads, context, dim, query.dtype)
    return F.scaled_dot_product_attention(
        by_row, keys, values, attn_mask=mask, is_causal=1 < queries == context, scale=scale, enable_gqa=True
    )


@lru_cache(maxsize=1)
def _contiguous(count: int, kv_heads: int, context: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, count, kv_heads, context, dim).to(dtype)
    return keys, values
