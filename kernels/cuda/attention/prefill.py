"""Prefill attention on Hopper (prefill.cu): rows with several queries."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import attention_arguments
from ...gpu.attention import Limits
from ...gpu.properties import gpu_properties
from ...ops.attention import Attend, Rows

_prefill = getattr(torch.ops.localllm, "prefill_attention", None)  # only in builds for Hopper

TILE_ROWS = 128  # same as PREFILL_TILE_ROWS in prefill.h
# Split-K attention (Triton) is faster for rows of up to SHORT_QUERIES queries. It is also faster for longer rows if the
# GPU has at least IDLE times as many multiprocessors as there are tiles, and a context has at least LONG positions.
SHORT_QUERIES = 4
IDLE = 4
LONG = 1024


def _fills_blocks(page_size: int) -> bool:
    """True if a block of 128 positions is whole pages or part of one page."""
    return page_size >= 8 and (128 % page_size == 0 or page_size % 128 == 0)


LIMITS = Limits(dims=(64, 128), group=TILE_ROWS, page_size=_fills_blocks)


def supports(query: Tensor, rows: Rows, attend: Attend) -> bool:
    """True if `prefill` supports this batch and is faster for it than split-K attention."""
    if _prefill is None or max(rows.query_lens) <= SHORT_QUERIES or not LIMITS.fit(query, attend):
        return False
    processors = _processors(query.device)
    tiles = tiles_of(rows, query.shape[1] // attend.kv_heads, SHORT_QUERIES + 1) * attend.kv_heads
    return processors > 0 and not leaves_idle(rows, tiles, processors)


def prefill(out: Tensor, query: Tensor, rows: Rows, attend: Attend, min_queries: int = 2) -> None:
    """Paged attention (kernels/ops/attention.py) into `out` [tokens, heads, dim], for rows with at least `min_queries`
    queries. Does not write the outputs of other rows."""
    tiles = tiles_of(rows, query.shape[1] // attend.kv_heads, min_queries)
    arguments = attention_arguments(rows, attend)
    torch.ops.localllm.prefill_attention.default(out, query, *arguments, min_queries, tiles)


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
