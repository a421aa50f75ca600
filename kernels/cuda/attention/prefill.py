"""Prefill attention on Hopper (prefill.cu): rows with several queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gpu.properties import gpu_properties
from ...ops.attention import Rows

_prefill = getattr(torch.ops.localllm, "prefill_attention", None)  # only in builds for Hopper

DIMS = (64, 128)
TYPES = (torch.bfloat16, torch.float16)
TILE_ROWS = 128  # same as PREFILL_TILE_ROWS in prefill.h
# Split-K attention (Triton) is faster for rows of up to SHORT_QUERIES queries. It is also faster for longer rows if the
# GPU has at least IDLE times as many multiprocessors as there are tiles, and a context has at least LONG positions.
SHORT_QUERIES = 4
IDLE = 4
LONG = 1024


def supports(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if `prefill` supports this batch and is faster for it than split-K attention."""
    heads, dim = query.shape[1:]
    if max(rows.query_lens) <= SHORT_QUERIES or _prefill is None or query.dtype not in TYPES or dim not in DIMS:
        return False
    size, kv_heads = key_pages.shape[1:3]
    whole_pages = 128 % size == 0 or size % 128 == 0  # a block of 128 positions is whole pages or part of one page
    shapes = key_pages.dtype == query.dtype and heads <= TILE_ROWS * kv_heads and size >= 8 and whole_pages
    if not shapes or not loads_aligned(query, key_pages, value_pages):
        return False
    processors = _processors(query.device)
    tiles = tiles_of(rows, heads // kv_heads, SHORT_QUERIES + 1) * kv_heads
    return processors > 0 and not leaves_idle(rows, tiles, processors)


def loads_aligned(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    """True if the kernels of this folder can read these tensors with loads of 16 bytes.

    Heads and pages must be dense and begin at multiples of 8 elements and 16 bytes. Both caches must have the same
    strides.
    """
    token, head, query_step = query.stride()
    page, slot, kv_head, cache_step = key_pages.stride()
    dense = query_step == cache_step == 1 and page == slot * key_pages.shape[1]
    alike = value_pages.stride() == key_pages.stride()
    if not dense or not alike or any(stride % 8 for stride in (token, head, slot, kv_head)):
        return False
    return all(tensor.data_ptr() % 16 == 0 for tensor in (query, key_pages, value_pages))


def prefill(
    out: Tensor,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: Rows,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    min_queries: int = 2,
) -> None:
    """Paged attention (kernels/ops/attention.py) into `out` [tokens, heads, dim], for rows with at least `min_queries`
    queries. Does not write the outputs of other rows."""
    sinks = None if sinks is None else sinks.float()
    tiles = tiles_of(rows, query.shape[1] // key_pages.shape[2], min_queries)
    tables = rows.row_starts, rows.context_lens, rows.page_table
    options = scale, window, soft_cap, min_queries
    torch.ops.localllm.prefill_attention.default(out, query, key_pages, value_pages, *tables, sinks, *options, tiles)


def tiles_of(rows: Rows, group: int, min_queries: int, tile_rows: int = TILE_ROWS) -> int:
    """The number of tiles of all rows with at least `min_queries` queries. A tile has tile_rows // group queries of a
    row; `group`: query heads per kv head."""
    key = "prefill", group, min_queries, tile_rows
    tiles: int | None = rows.plans.get(key)
    if tiles is None:
        tile_queries = tile_rows // group
        row_tiles = [-(-queries // tile_queries) for queries in rows.query_lens if queries >= min_queries]
        tiles = rows.plans[key] = sum(row_tiles)
    return tiles


def leaves_idle(rows: Rows, tiles: int, processors: int) -> bool:
    """True if `tiles`, the tiles of all kv heads, occupy so few multiprocessors that split-K attention is faster."""
    return tiles * IDLE <= processors and max(rows.contexts) >= LONG


def _processors(device: torch.device) -> int:
    """The number of multiprocessors of a Hopper GPU; 0 for other devices."""
    if device.type != "cuda" or gpu_properties(device).capability != (9, 0):
        return 0
    return gpu_properties(device).processors
