"""Prefill attention on Hopper (attention_extend.cu): rows with several queries."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..ops.attention import Rows

_extend = getattr(torch.ops.localllm, "extend_attention", None)  # built for Hopper only

DIMS = (64, 128)
TYPES = (torch.bfloat16, torch.float16)
TILE_ROWS = 128  # EXTEND_TILE_ROWS in attention_extend.h
# Split-K attention (Triton) is faster for rows of up to SHORT_QUERIES queries. It is also faster for longer rows if the
# GPU has at least IDLE times as many multiprocessors as there are tiles, and a context has at least LONG positions.
SHORT_QUERIES = 4
IDLE = 4
LONG = 1024


def serves(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if `extend` supports this batch and is faster for it than split-K attention."""
    heads, dim = query.shape[1:]
    size, kv_heads = key_pages.shape[1:3]
    if max(rows.query_lens) <= SHORT_QUERIES or _extend is None or query.dtype not in TYPES or dim not in DIMS:
        return False
    token, head, one = query.stride()
    page, slot, cache_head, cache_one = key_pages.stride()
    return (
        key_pages.dtype == query.dtype
        and heads <= TILE_ROWS * kv_heads
        and size >= 8
        and (size % 128 == 0 if size >= 128 else 128 % size == 0)
        and one == cache_one == 1
        and page == slot * size
        and value_pages.stride() == key_pages.stride()
        and not any(stride % 8 for stride in (token, head, slot, cache_head))
        and not any(tensor.data_ptr() % 16 for tensor in (query, key_pages, value_pages))
        and _processors(query.device) > 0
        and not _leaves_idle(rows, heads // kv_heads, kv_heads, _processors(query.device))
    )


def extend(
    out: Tensor,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: Rows,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    fewest: int = 2,
) -> None:
    """Paged attention (kernels/ops/attention.py) into `out` [tokens, heads, dim], for rows with at least `fewest`
    queries. Does not write the outputs of other rows."""
    sinks = None if sinks is None else sinks.float()
    tiles = tiles_of(rows, query.shape[1] // key_pages.shape[2], fewest)
    starts = rows.row_starts
    contexts = rows.context_lens
    table = rows.page_table
    torch.ops.localllm.extend_attention.default(
        *(out, query, key_pages, value_pages, starts, contexts, table, sinks),
        *(scale, window, soft_cap, fewest, tiles),
    )


def tiles_of(rows: Rows, group: int, fewest: int) -> int:
    """The number of tiles. A tile has TILE_ROWS // group queries of a row; `group`: query heads per kv head."""
    key = "extend", group, fewest
    tiles: int | None = rows.plans.get(key)
    if tiles is None:
        each = TILE_ROWS // group
        tiles = rows.plans[key] = sum(-(-queries // each) for queries in rows.query_lens if queries >= fewest)
    return tiles


def _leaves_idle(rows: Rows, group: int, kv_heads: int, processors: int) -> bool:
    return tiles_of(rows, group, SHORT_QUERIES + 1) * kv_heads * IDLE <= processors and max(rows.contexts) >= LONG


@cache
def _processors(device: torch.device) -> int:
    """The multiprocessors of a Hopper GPU; 0 for other devices."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return torch.cuda.get_device_properties(device).multi_processor_count if hopper else 0
