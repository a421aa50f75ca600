"""Attention over the paged cache in Triton; kernels/ops/attention.py defines it.

attention_decode.py splits contexts over programs. It computes rows with few queries, and long rows whose tiles are too
few for the device. attention_prefill.py computes all other rows. A line of a tile is one query of one head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor

from ..ops import attention as reference
from ..ops.attention import Attend, Rows
from .attention_decode import decode
from .attention_plan import SHORT_QUERIES, Launch, plan
from .attention_prefill import prefill
from .target import FLOATS, Device, counters, device_properties

MAX_DIM = 512
LATENT_HEADS = 16  # largest number of heads of a tile of latent attention
MAX_ACCUMULATORS = 128  # registers of a thread that can hold results
LATENT_ACCUMULATORS = 64  # the same for a latent cache: its keys and values are one operand, which takes registers
LARGE_SHARED = 163 << 10  # bytes; with this much shared memory larger tiles fit
PREFETCH_SHARED = 200 << 10  # bytes of shared memory above which Triton prefetches one more block of keys and values

Fp8 = Literal["", "native", "bits"]  # conversion of a float8 cache; empty: the cache has the queries' dtype


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block sizes of a program, and its launch options."""

    m: int  # lines (query and head) of a tile, padded
    n: int  # positions of the cache in a block
    d: int  # head dimension, padded
    warps: int
    stages: int
    resident: int  # programs that run on one processor at the same time
    e: int = 0  # columns of latent keys that are no values, padded; 0: the cache has keys and values

    def shared(self, dtype: torch.dtype, device: Device) -> int:
        """Upper bound of the shared memory in bytes: queries, prefetched keys and values, and attention weights."""
        buffers = self.stages // 2 + (device.shared > PREFETCH_SHARED)
        position = self.d + self.e if self.e else 2 * self.d
        return (self.m * (self.d + self.e) + buffers * self.n * position + self.m * self.n) * dtype.itemsize + 512

    def fits(self, dtype: torch.dtype, device: Device) -> bool:
        accumulators = LATENT_ACCUMULATORS if self.e else MAX_ACCUMULATORS
        return self.shared(dtype, device) <= device.shared and self.m * self.d <= accumulators * 32 * self.warps


class Call(NamedTuple):
    """The arguments of one call of attention, converted for both kernels.

    With `extra`, the cache is latent: `query` and `keys` are views without their first `extra` columns, which the
    kernels read before the views, and `values` equals `keys`.
    """

    out: Tensor
    query: Tensor
    keys: Tensor  # pages; several heads may be views of the same memory
    values: Tensor
    sinks: Tensor | None
    rows: Rows
    options: tuple[float, float, int]  # scale, soft cap, window
    fp8: Fp8
    device: Device
    extra: int = 0

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.query.shape[1] // self.kv_heads

    def pointers(self, tiles: Tensor | None) -> tuple[Tensor, ...]:
        """The tensor arguments. An absent tensor is replaced by another one, which the kernels do not read."""
        rows = self.rows
        sinks = self.out if self.sinks is None else self.sinks.float()
        listed = rows.row_starts if tiles is None else tiles
        tables = listed, rows.row_starts, rows.context_lens, rows.page_table
        return self.out, self.query, self.keys, self.values, sinks, *tables

    def strides(self) -> tuple[int, ...]:
        pages = *self.keys.stride()[:3], *self.values.stride()[:3]
        return *self.query.stride()[:2], *pages, self.out.stride(0), self.rows.page_table.stride(0)

    def constants(self, launch: Launch, blocks: Blocks) -> dict[str, Any]:
        _, soft_cap, window = self.options
        return {
            "GROUP": self.group,
            "QUERIES": launch.queries,
            "DIM": self.query.shape[2],
            "PAGE_SIZE": self.keys.shape[1],
            "BLOCK_M": blocks.m,
            "BLOCK_N": blocks.n,
            "BLOCK_D": blocks.d,
            "EXTRA": self.extra,
            "BLOCK_E": blocks.e,
            "WINDOW": window > 0,
            "CAP": soft_cap > 0,
            "SINKS": self.sinks is not None,
            "FP8": self.fp8,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }


def paged_attention(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    """The cache has the queries' dtype, float8_e4m3fn or the float8 format of the target. Queries and pages may be
    strided views. Concurrent calls on two streams are safe."""
    device = device_properties(query.device)
    dim = query.shape[2]
    key_pages, value_pages = attend.key_pages, attend.value_pages
    is_supported = _supported(query, key_pages, value_pages, device) and dim <= MAX_DIM
    tile_sizes = tiling(query.shape[1] // attend.kv_heads, dim, query.dtype, device) if is_supported else None
    if tile_sizes is None:
        return reference.paged_attention(query, rows, attend, out)
    out = query.new_empty(query.shape) if out is None else out
    fp8 = _fp8_conversion(query.dtype, key_pages.dtype, device)
    if fp8 == "bits":
        key_pages = key_pages.view(torch.uint8)
        value_pages = value_pages.view(torch.uint8)
    options = attend.scale, attend.soft_cap, attend.window
    call = Call(out, query, key_pages, value_pages, attend.sinks, rows, options, fp8, device)
    _compute(call, tile_sizes)
    return out


def latent_attention(
    query: Tensor, pages: tuple[Tensor, ...], rows: Rows, scale: float, start: int, out: Tensor | None = None
) -> Tensor:
    """The cache has the queries' dtype. Queries and pages may be strided views. Concurrent calls on two streams are
    safe. Pages in two parts have the reference."""
    keys, *others = pages
    device = device_properties(query.device)
    tokens, heads, dim = query.shape
    rank = dim - start
    group = _latent_group(heads)
    is_supported = (
        not others and _supported(query, keys, keys, device) and keys.dtype == query.dtype and rank <= MAX_DIM
    )
    tile_sizes = tiling(group, rank, query.dtype, device, start) if is_supported else None
    if tile_sizes is None:
        return reference.latent_attention(query, pages, rows, scale, start, out)
    out = query.new_empty(tokens, heads, rank) if out is None else out
    # Programs of the same positions read the same memory, each for `group` heads.
    latents = keys[..., start:].expand(-1, -1, heads // group, -1)
    call = Call(out, query[..., start:], latents, latents, None, rows, (scale, 0.0, 0), "", device, start)
    _compute(call, tile_sizes)
    return out


def _latent_group(heads: int) -> int:
    """The number of heads whose queries are in one tile: the largest divisor of `heads` that is at most
    LATENT_HEADS."""
    return max(group for group in range(1, min(heads, LATENT_HEADS) + 1) if heads % group == 0)


def _compute(call: Call, tile_sizes: tuple[int, int]) -> None:
    """Launch the kernels that compute call.out."""
    dtype = call.query.dtype
    for launch, tiles in _launches(call, tile_sizes):
        lines = launch.queries * call.group
        blocks = shape(lines, launch.queries, call.query.shape[2], dtype, call.device, call.extra)
        if launch.kernel == "prefill":
            grid = call.kv_heads, launch.count
            prefill[grid](*call.pointers(tiles), *call.strides(), *call.options, **call.constants(launch, blocks))
        else:
            _decode(call, launch, tiles, blocks)


def _fp8_conversion(query: torch.dtype, cache: torch.dtype, device: Device) -> Fp8:
    if cache == query:
        return ""
    return "native" if device.target.fp8 == cache else "bits"


def _launches(call: Call, tile_sizes: tuple[int, int]) -> list[tuple[Launch, Tensor | None]]:
    """The launches for the rows of the call, with their tiles on the device; planned once for all layers of a step."""
    rows = call.rows
    key = "triton", call.group, call.kv_heads, tile_sizes
    if key not in rows.plans:
        processors = call.device.processors
        launches = plan(rows.query_lens, rows.contexts, call.group, call.kv_heads, *tile_sizes, processors)
        rows.plans[key] = [(launch, _listed(launch, call.query.device)) for launch in launches]
    planned: list[tuple[Launch, Tensor | None]] = rows.plans[key]
    return planned


def _decode(call: Call, launch: Launch, tiles: Tensor | None, blocks: Blocks) -> None:
    chunks = max(1, call.device.processors * blocks.resident // call.kv_heads)
    places = 2 * chunks * call.kv_heads
    lines = call.group * launch.queries
    device = call.out.device
    partial = torch.empty(places, lines, call.query.shape[2], dtype=torch.float32, device=device)
    stats = torch.empty(places, 2, lines, dtype=torch.float32, device=device)
    zeros = counters(device, 1 << max(12, (launch.count * call.kv_heads - 1).bit_length()))
    decode[call.kv_heads, chunks](
        *call.pointers(tiles),
        *(partial, stats, zeros),
        *call.strides(),
        *(launch.count, chunks),
        *call.options,
        **call.constants(launch, blocks),
        **merging(lines, launch.queries, blocks.d, call.device),
        ALONE=launch.count == 1,
        LISTED=launch.tiles is not None,
    )


def merging(lines: int, queries: int, block_d: int, device: Device) -> dict[str, int]:
    """The constants PARTS and STEP of `decode`, which merges STEP lines (query and head) of PARTS partial results at a
    time. PARTS is smaller for tiles with many queries."""
    parts = 16 if queries <= SHORT_QUERIES else 4
    return {
        "PARTS": parts,
        "STEP": max(1, min(triton.next_power_of_2(lines), device.target.operands // 2 // parts // block_d)),
    }


def _supported(query: Tensor, key_pages: Tensor, value_pages: Tensor, device: Device) -> bool:
    dtypes = query.dtype in FLOATS and key_pages.dtype in (query.dtype, torch.float8_e4m3fn, device.target.fp8)
    dense_heads = query.stride(2) == key_pages.stride(3) == value_pages.stride(3) == 1
    return dtypes and dense_heads


@cache
def tiling(group: int, dim: int, dtype: torch.dtype, device: Device, extra: int = 0) -> tuple[int, int] | None:
    """(lines per tile of a long row, maximum of queries of a short row: a short row fits into one tile).

    A line is one query of one head. The shared memory limits both numbers, on narrow targets also the registers; None
    if they are too small for a tile of one query.
    """

    def fits(queries: int) -> bool:
        blocks = shape(queries * group, queries, dim, dtype, device, extra)
        rows = blocks.m if queries > 1 else 16  # a warp holds the operands of 16 rows at least
        in_registers = rows * blocks.d * dtype.itemsize <= device.target.operands
        return blocks.fits(dtype, device) and (in_registers or not device.target.narrow)

    short_queries = SHORT_QUERIES
    while short_queries and not fits(short_queries):
        short_queries //= 2
    lines = max_lines(dim, dtype, device)
    while lines > group and not fits(lines // group):
        lines //= 2
    return (lines, short_queries) if short_queries else None


def max_lines(dim: int, dtype: torch.dtype, device: Device) -> int:
    """The largest number of lines (query and head) in a tile of a long row."""
    return 32 if dtype == torch.float32 else _large_tile(dim, device)  # float32 does not use tensor cores


def _large_tile(dim: int, device: Device) -> int:
    """The number of lines (query and head) of a tile for eight warps. It is smaller for a large head dim, because each
    line needs more shared memory."""
    if dim > 256:
        return 32
    return 128 if device.shared >= LARGE_SHARED and dim <= 128 else 64


def shape(lines: int, queries: int, dim: int, dtype: torch.dtype, device: Device, extra: int = 0) -> Blocks:
    """The block sizes for tiles of `lines` lines (query and head), with up to `queries` queries. `extra`: see Call."""
    if extra:
        return _latent_shape(lines, dim, extra, dtype, device)
    m = max(16, triton.next_power_of_2(lines))
    d = max(16, triton.next_power_of_2(dim))
    large = device.shared >= LARGE_SHARED
    n = max(16, min(64 if large else 32, 16384 // (d * dtype.itemsize)))
    if device.target.narrow:
        n = max(16, n // 2)
    stage = 2 * n * d * dtype.itemsize  # bytes
    long = queries > SHORT_QUERIES
    resident = 1 if long else 2
    query_bytes = m * d * dtype.itemsize if long else 0
    buffers = (device.shared - query_bytes) // resident - 4096
    stages = max(1, min(2, buffers // stage))
    warps = 8 if m >= _large_tile(dim, device) else 4
    depth = 2 * stages + 1  # with the prefetch of the page table
    if device.target.narrow:
        warps = 8 if d * dtype.itemsize <= 256 else 16
        depth = 2 if m > 16 else depth
    return Blocks(m, n, d, warps, depth, resident)


def _latent_shape(lines: int, dim: int, extra: int, dtype: torch.dtype, device: Device) -> Blocks:
    """The block sizes of a latent cache. Values need no memory of their own, but the queries are large."""
    m = max(16, triton.next_power_of_2(lines))
    d = max(16, triton.next_power_of_2(dim))
    e = max(16, triton.next_power_of_2(extra))
    n = max(16, min(64 if device.shared >= LARGE_SHARED else 32, 32768 // (d * dtype.itemsize)))
    if device.target.narrow or (m >= 32 and device.shared < LARGE_SHARED):
        n = 16
    resident = 2 if m == 16 else 1
    if device.target.narrow:
        return Blocks(m, n, d, 16, 2, resident, e)
    warps = 8 if m >= 32 else 4
    blocks = Blocks(m, n, d, warps, 3, resident, e)
    while n > 16 and not blocks.fits(dtype, device):
        n //= 2
        blocks = replace(blocks, n=n)
    deeper = replace(blocks, stages=5)
    return deeper if resident * deeper.shared(dtype, device) <= device.shared else blocks


def _listed(launch: Launch, device: torch.device) -> Tensor | None:
    """The row and the first query of each tile, [tiles, 2] int32, copied to the device asynchronously. None if every
    row is a tile."""
    if launch.tiles is None:
        return None
    tiles = torch.tensor(launch.tiles, dtype=torch.int32)
    return tiles.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tiles
