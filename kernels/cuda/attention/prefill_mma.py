"""Prefill attention with mma.sync (prefill_mma.cu): rows with several queries, on every GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...gpu.properties import gpu_properties
from ...ops.attention import Rows
from ...triton.problem import triton_problem
from .prefill import SHORT_QUERIES, TYPES, leaves_idle, loads_aligned, tiles_of

_prefill = torch.ops.localllm.prefill_attention_mma.default

DIMS = (64, 80, 96, 128, 192, 256)
LARGE_DIM = 128  # largest head size that has large tiles
SMALL_TILE = 64  # rows of a tile; as in prefill.h
LARGE_TILE = 128
FILLED = 2  # large tiles per multiprocessor from which they are faster than small tiles
TRITON = not triton_problem()  # False: only the reference computes what this kernel does not
# Major compute capabilities with other instructions for the tensor cores. Triton's wgmma is faster only for head sizes
# that it does not pad.
WGMMA = 9
WGMMA_DIMS = (64, 128)
TCGEN05 = (10, 11)


def supports(query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: Rows) -> bool:
    """True if `prefill` supports this batch and is the fastest implementation that this machine has."""
    heads, dim = query.shape[1:]
    if query.dtype not in TYPES or dim not in DIMS:
        return False
    size, kv_heads = key_pages.shape[1:3]
    shapes = size & (size - 1) == 0 and heads <= SMALL_TILE * kv_heads
    if not shapes or not _reads_cache(query, key_pages) or not loads_aligned(query, key_pages, value_pages):
        return False
    return not (TRITON and _triton_faster(rows, heads // kv_heads, kv_heads, dim, query.device))


def _triton_faster(rows: Rows, group: int, kv_heads: int, dim: int, device: torch.device) -> bool:
    """True for rows with few queries, for few tiles with a long context (both: split-K attention), and for GPUs whose
    tensor cores have instructions that are faster than mma.sync and that Triton uses."""
    properties = gpu_properties(device)
    major = properties.capability[0]
    faster_instructions = major in TCGEN05 or (major == WGMMA and dim in WGMMA_DIMS)
    if faster_instructions or max(rows.query_lens) <= SHORT_QUERIES:
        return True
    tiles = tiles_of(rows, group, SHORT_QUERIES + 1, SMALL_TILE)
    return leaves_idle(rows, tiles * kv_heads, properties.processors)


def _reads_cache(query: Tensor, pages: Tensor) -> bool:
    """True if the kernel reads a cache of this dtype. It copies 16 bytes at a time: 16 elements of float8."""
    if pages.dtype == query.dtype:
        return True
    _, slot, kv_head, _ = pages.stride()
    return pages.dtype == torch.float8_e4m3fn and slot % 16 == kv_head % 16 == 0


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
    queries. Does not write the outputs of other rows. The cache has the queries' dtype or float8_e4m3fn."""
    sinks = None if sinks is None else sinks.float()
    kv_heads, dim = key_pages.shape[2:]
    group = query.shape[1] // kv_heads
    tile_rows = LARGE_TILE if dim <= LARGE_DIM else SMALL_TILE
    tiles = tiles_of(rows, group, min_queries, tile_rows)
    if tiles * kv_heads < FILLED * gpu_properties(query.device).processors:
        tile_rows = SMALL_TILE
        tiles = tiles_of(rows, group, min_queries, tile_rows)
    tables = rows.row_starts, rows.context_lens, rows.page_table
    options = scale, window, soft_cap, min_queries
    _prefill(out, query, key_pages, value_pages, *tables, sinks, *options, tile_rows, tiles)
