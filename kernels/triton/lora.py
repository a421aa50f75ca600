"""LoRA products over tiles of tokens with the same adapter: chunked segments, as in S-LoRA (Sheng et al., 2023).

A projection needs two launches, whatever the number of adapters. `shrink` computes x Aᵀ of every slice, with the inputs
divided into shares (split-K). `expand` adds up the shares and adds their product with B to the output. The embedding
has `lookup` in place of `shrink`: it reads a column of A for each token.

A program keeps its operands in shared memory, so blocks of inputs, ranks and results bound it for every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.lora import LoraWeights
from ..ops.lora import add as reference_add
from ..ops.lora import embedding as reference_embedding
from ..ops.step import Adapters, Tiles
from .target import Device, device_properties

COLUMNS = 64  # results of A, and outputs, of a program
SHARE = 128  # smallest number of inputs of a share
MAX_SHARES = 16


class Blocks(NamedTuple):
    """The launch parameters of `shrink`."""

    columns: int
    inputs: int
    stages: int

    def shared(self, chunk: int, dtype: torch.dtype) -> int:
        """Bytes of shared memory for the operands of all stages."""
        return self.stages * (chunk + self.columns) * self.inputs * dtype.itemsize


@triton.jit(do_not_specialize=["tokens"])
def shrink(
    inner, x, a, order, starts, slots, in_features, tokens, x_stride, a_stride, share,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, shares of `share` inputs, blocks of COLUMNS results. Writes inner [shares, tokens, WIDTH] float32,
    where the tokens have the order of `order`."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if first < end:
        slot = tl.load(slots + tile).to(tl.int64)
        place = first + tl.arange(0, CHUNK)
        live = place < end
        token = tl.load(order + place, mask=live, other=0).to(tl.int64)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        from_x = x + token[:, None] * x_stride
        from_a = a + slot * a_stride + column[None, :] * in_features
        sums = tl.zeros((CHUNK, COLUMNS), tl.float32)
        stop = tl.minimum((part + 1) * share, in_features)
        for base in range(part * share, stop, BLOCK_K):
            k = base + tl.arange(0, BLOCK_K)
            within = k < stop
            values = tl.load(from_x + k[None, :], mask=live[:, None] & within[None, :], other=0.0)
            factors = tl.load(from_a + k[:, None], mask=inside[None, :] & within[:, None], other=0.0)
            sums = tl.dot(values, factors.to(values.dtype), sums, input_precision="ieee")
        to = inner + (part * tokens + place.to(tl.int64))[:, None] * WIDTH + column[None, :]
        tl.store(to, sums, mask=live[:, None] & inside[None, :])


@triton.jit
def lookup(
    inner, ids, a, order, starts, slots, vocab, a_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Grid: tiles. Writes inner [tokens, WIDTH] float32, where the tokens have the order of `order`. ids [tokens] int32
    are token ids, the columns of A to read."""
    tile = tl.program_id(0)
    first = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if first < end:
        slot = tl.load(slots + tile).to(tl.int64)
        place = first + tl.arange(0, CHUNK)
        live = place < end
        token = tl.load(order + place, mask=live, other=0)
        column = tl.load(ids + token, mask=live, other=0).to(tl.int64)
        rank = tl.arange(0, PADDED)
        valid = live[:, None] & (rank < WIDTH)[None, :]
        values = tl.load(a + slot * a_stride + rank[None, :].to(tl.int64) * vocab + column[:, None], mask=valid)
        to = inner + place.to(tl.int64)[:, None] * WIDTH + rank[None, :]
        tl.store(to, values.to(tl.float32), mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def expand(
    out, inner, b, scales, order, starts, slots, tokens, out_stride, b_stride, width0, width1, width2,
    RANK: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, blocks of outputs. The projection has up to three slices, with width0, width1 and width2 outputs; a
    block has outputs of one slice."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    first = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if first < end:
        blocks0 = tl.cdiv(width0, BLOCK_N)
        blocks1 = tl.cdiv(width1, BLOCK_N)
        second = block >= blocks0
        third = block >= blocks0 + blocks1
        slice_index = second.to(tl.int32) + third.to(tl.int32)
        begin = tl.where(third, width0 + width1, tl.where(second, width0, 0))
        width = tl.where(third, width2, tl.where(second, width1, width0))
        block -= tl.where(third, blocks0 + blocks1, tl.where(second, blocks0, 0))
        slot = tl.load(slots + tile).to(tl.int64)
        place = first + tl.arange(0, CHUNK)
        live = place < end
        token = tl.load(order + place, mask=live, other=0).to(tl.int64)
        scale = tl.load(scales + token, mask=live, other=0.0)[:, None]
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < width
        output = begin + column
        from_inner = inner + place.to(tl.int64)[:, None] * WIDTH + slice_index * RANK
        from_b = b + slot * b_stride + output[None, :] * RANK
        delta = tl.zeros((CHUNK, BLOCK_N), tl.float32)
        for base in tl.range(0, RANK, RANKS, num_stages=1):
            rank = base + tl.arange(0, RANKS)
            real = rank < RANK
            valid = live[:, None] & real[None, :]
            sums = tl.zeros((CHUNK, RANKS), tl.float32)
            for part in tl.range(0, SHARES, num_stages=1, loop_unroll_factor=2):
                sums += tl.load(from_inner + part * tokens.to(tl.int64) * WIDTH + rank[None, :], mask=valid, other=0.0)
            factors = tl.load(from_b + rank[:, None], mask=inside[None, :] & real[:, None], other=0.0)
            delta = tl.dot(sums * scale, factors.to(tl.float32), delta, input_precision=PRECISION)
        to = out + token[:, None] * out_stride + output[None, :]
        store = live[:, None] & inside[None, :]
        result = tl.load(to, mask=store, other=0.0).to(tl.float32) + delta
        tl.store(to, result.to(out.dtype.element_ty), mask=store)


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    """See kernels/ops/lora.py. The reference computes steps without tiles, and projections that the kernels do not
    support."""
    tiles = adapters.tiles
    if tiles is None or x.stride(1) != 1 or x.dtype != weights.a.dtype or not _covered(out, weights):
        reference_add(out, x, weights, adapters)
        return
    tokens = len(x)
    in_features = x.shape[1]
    width = weights.a.shape[1]
    device = device_properties(x.device)
    blocks = blocks_of(tiles.chunk, width, x.dtype, device)
    column_blocks = triton.cdiv(width, blocks.columns)
    count = len(tiles.slots)
    shares = _shares(count * column_blocks, in_features, device)
    share = triton.cdiv(triton.cdiv(in_features, shares), SHARE) * SHARE
    shares = triton.cdiv(in_features, share)
    inner = torch.empty(shares, tokens, width, dtype=torch.float32, device=x.device)
    shrink[count, shares, column_blocks](
        *(inner, x, weights.a, *tiles[:3], in_features, tokens, x.stride(0), weights.a.stride(0), share),
        WIDTH=width,
        COLUMNS=blocks.columns,
        CHUNK=tiles.chunk,
        BLOCK_K=blocks.inputs,
        num_stages=blocks.stages,
        num_warps=warps_of(tiles.chunk),
    )
    _expand(out, inner, weights, adapters.scales, tiles)


def embedding(out: Tensor, tokens: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    """See kernels/ops/lora.py. The reference computes steps without tiles."""
    tiles = adapters.tiles
    if tiles is None or not _covered(out, weights):
        reference_embedding(out, tokens, weights, adapters)
        return
    width = weights.rank
    inner = torch.empty(1, len(tokens), width, dtype=torch.float32, device=out.device)
    lookup[(len(tiles.slots),)](
        *(inner, tokens, weights.a, *tiles[:3], weights.a.shape[2], weights.a.stride(0)),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        CHUNK=tiles.chunk,
        num_warps=warps_of(tiles.chunk),
    )
    _expand(out, inner, weights, adapters.scales, tiles)


def _expand(out: Tensor, inner: Tensor, weights: LoraWeights, scales: Tensor, tiles: Tiles) -> None:
    """Add the product of `inner` [shares, tokens, slices * rank] with B to `out`."""
    shares, tokens, width = inner.shape
    widths = (*weights.widths, 0, 0)[:3]
    device = device_properties(out.device)
    expand[len(tiles.slots), sum(triton.cdiv(size, COLUMNS) for size in widths)](
        *(out, inner, weights.b, scales, *tiles[:3], tokens, out.stride(0), weights.b.stride(0), *widths),
        RANK=weights.rank,
        WIDTH=width,
        SHARES=shares,
        CHUNK=tiles.chunk,
        **expansion(tiles.chunk, weights.rank, weights.b.dtype, device),
    )


def _covered(out: Tensor, weights: LoraWeights) -> bool:
    return out.stride(1) == 1 and len(weights.widths) <= 3


def blocks_of(chunk: int, width: int, dtype: torch.dtype, device: Device) -> Blocks:
    """The largest blocks of `shrink` whose operands fit the device, for tiles of `chunk` tokens and `width` results.
    Where the operands are in registers (float32, narrow targets), blocks have few inputs."""
    columns = min(COLUMNS, padded(width))
    most = 32 if dtype == torch.float32 or device.target.narrow else 128
    shapes = (Blocks(columns, inputs, stages) for inputs in (most, 32, 16) for stages in (3, 2, 1))
    return next(blocks for blocks in shapes if blocks.shared(chunk, dtype) <= device.shared)


def expansion(chunk: int, rank: int, dtype: torch.dtype, device: Device) -> dict[str, Any]:
    """The launch parameters of `expand`: few ranks at once where the operands of a product are in registers."""
    on_tensor_cores = device.target.precision == "tf32" and dtype != torch.float32
    return {
        "RANKS": min(32 if on_tensor_cores else 16, padded(rank)),
        "BLOCK_N": COLUMNS,
        "PRECISION": "tf32" if on_tensor_cores else "ieee",
        "num_warps": warps_of(chunk),
    }


def warps_of(chunk: int) -> int:
    """The warps that keep the results of a tile in registers."""
    return 4 if chunk <= 16 else 8


def padded(size: int) -> int:
    """The smallest power of two that is at least `size` and that tl.dot supports."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def _shares(programs: int, in_features: int, device: Device) -> int:
    """The number of shares of the inputs: enough programs for all processors, and at least SHARE inputs a share."""
    idle: int = triton.next_power_of_2(device.processors // max(1, programs))
    return max(1, min(MAX_SHARES, idle, in_features // SHARE))
