"""Prefill attention with mma.sync (prefill_mma.cu): rows with several queries, on every GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import attention_arguments
from ...gpu.attention import Limits, is_power_of_two
from ...gpu.properties import gpu_properties
from ...ops.attention import Attend, Rows
from ...triton.problem import triton_problem
from .prefill import SHORT_QUERIES, leaves_idle, tiles_of

_prefill = torch.ops.localllm.prefill_attention_mma.default

LARGE_DIM = 128  # largest head size that has large tiles
SMALL_TILE = 64  # rows of a tile; as in prefill.h
# The kernel copies 16 bytes at a time: 16 elements of float8.
LIMITS = Limits(dims=(64, 80, 96, 128, 192, 256), group=SMALL_TILE, page_size=is_power_of_two, fp8_step=16)
LARGE_TILE = 128
FILLED = 2  # large tiles per multiprocessor from which they are faster than small tiles
TRITON = not triton_problem()  # False: the reference computes the calls that this kernel does not support
# Major compute capabilities with other instructions for the tensor cores. Triton's wgmma is faster only for head sizes
# that it does not pad.
WGMMA = 9
WGMMA_DIMS = (64, 128)
TCGEN05 = (10, 11)


def supports(query: Tensor, rows: Rows, attend: Attend) -> bool:
    """True if `prefill` supports this batch and is the fastest implementation that this machine has."""
    return LIMITS.fit(query, attend) and not (TRITON and _triton_faster(query, rows, attend.kv_heads))


def _triton_faster(query: Tensor, rows: Rows, kv_heads: int) -> bool:
    """True for rows with few queries, for few tiles with a long context (both: split-K attention), and for GPUs whose
    tensor cores have instructions that are faster than mma.sync and that Triton uses."""
    properties = gpu_properties(query.device)
    heads, dim = query.shape[1:]
    major = properties.capability[0]
    faster_instructions = major in TCGEN05 or (major == WGMMA and dim in WGMMA_DIMS)
    if faster_instructions or max(rows.query_lens) <= SHORT_QUERIES:
        return True
    tiles = tiles_of(rows, heads // kv_heads, SHORT_QUERIES + 1, SMALL_TILE)
    return leaves_idle(rows, tiles * kv_heads, properties.processors)


def prefill(out: Tensor, query: Tensor, rows: Rows, attend: Attend, min_queries: int = 2) -> None:
    """Paged attention (kernels/ops/attention.py) into `out` [tokens, heads, dim], for rows with at least `min_queries`
    queries. Does not write the outputs of other rows. The cache has the queries' dtype or float8_e4m3fn."""
    kv_heads = attend.kv_heads
    group = query.shape[1] // kv_heads
    tile_rows = LARGE_TILE if query.shape[2] <= LARGE_DIM else SMALL_TILE
    tiles = tiles_of(rows, group, min_queries, tile_rows)
    if tiles * kv_heads < FILLED * gpu_properties(query.device).processors:
        tile_rows = SMALL_TILE
        tiles = tiles_of(rows, group, min_queries, tile_rows)
    _prefill(out, query, *attention_arguments(rows, attend), min_queries, tile_rows, tiles)
