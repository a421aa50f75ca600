"""LoRA products over tiles of tokens with the same adapter: chunked segments, as in S-LoRA (Sheng et al., 2023).

A projection needs two launches, whatever the number of adapters. `shrink` computes x Aᵀ of every slice, with the inputs
divided into shares (split-K). `expand` adds up the shares and adds their product with B to the output. The embedding
has `lookup` in place of `shrink`: it reads a column of A for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.lora import LoraWeights
from ..ops.lora import add as reference_add
from ..ops.lora import embedding as reference_embedding
from ..ops.step import Adapters, Tiles
from .target import device_properties

BLOCK_K = 128
BLOCK_N = 64
MAX_SHARES = 16
MAX_WIDTH = 256  # largest slices * rank: the number of results of A for a token


@triton.jit(do_not_specialize=["tokens"])
def shrink(
    inner, x, a, order, starts, slots, in_features, tokens, x_stride, a_stride, share,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, shares of `share` inputs. Writes inner [shares, tokens, WIDTH] float32, where the tokens have the
    order of `order`."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    first = tl.load(starts + tile)
    end = tl.load(starts + tile + 1)
    if first < end:
        slot = tl.load(slots + tile).to(tl.int64)
        place = first + tl.arange(0, CHUNK)
        live = place < end
        token = tl.load(order + place, mask=live, other=0).to(tl.int64)
        column = tl.arange(0, PADDED)
        inside = column < WIDTH
        from_x = x + token[:, None] * x_stride
        from_a = a + slot * a_stride + column[None, :] * in_features
        sums = tl.zeros((CHUNK, PADDED), tl.float32)
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
    RANK: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, CHUNK: tl.constexpr,
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
        rank = tl.arange(0, PADDED)
        real = rank < RANK
        from_inner = inner + place.to(tl.int64)[:, None] * WIDTH + slice_index * RANK + rank[None, :]
        valid = live[:, None] & real[None, :]
        sums = tl.zeros((CHUNK, PADDED), tl.float32)
        for part in tl.static_range(SHARES):
            sums += tl.load(from_inner + part * tokens.to(tl.int64) * WIDTH, mask=valid, other=0.0)
        sums *= tl.load(scales + token, mask=live, other=0.0)[:, None]
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < width
        output = begin + column
        from_b = b + slot * b_stride + output[None, :] * RANK + rank[:, None]
        factors = tl.load(from_b, mask=inside[None, :] & real[:, None], other=0.0)
        delta = tl.dot(sums, factors.to(tl.float32), input_precision=PRECISION)
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
    count = len(tiles.slots)
    shares = _shares(count, in_features, x.device)
    share = triton.cdiv(triton.cdiv(in_features, shares), BLOCK_K) * BLOCK_K
    shares = triton.cdiv(in_features, share)
    inner = torch.empty(shares, tokens, width, dtype=torch.float32, device=x.device)
    shrink[count, shares](
        *(inner, x, weights.a, *tiles[:3], in_features, tokens, x.stride(0), weights.a.stride(0), share),
        WIDTH=width,
        PADDED=_padded(width),
        CHUNK=tiles.chunk,
        BLOCK_K=BLOCK_K,
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
    )
    _expand(out, inner, weights, adapters.scales, tiles)


def _expand(out: Tensor, inner: Tensor, weights: LoraWeights, scales: Tensor, tiles: Tiles) -> None:
    """Add the product of `inner` [shares, tokens, slices * rank] with B to `out`."""
    shares, tokens, width = inner.shape
    widths = (*weights.widths, 0, 0)[:3]
    is_wide = weights.b.dtype == torch.float32
    expand[len(tiles.slots), sum(triton.cdiv(size, BLOCK_N) for size in widths)](
        *(out, inner, weights.b, scales, *tiles[:3], tokens, out.stride(0), weights.b.stride(0), *widths),
        RANK=weights.rank,
        PADDED=_padded(weights.rank),
        WIDTH=width,
        SHARES=shares,
        CHUNK=tiles.chunk,
        BLOCK_N=BLOCK_N,
        PRECISION="tf32" if device_properties(out.device).compiler == "cuda" and not is_wide else "ieee",
    )


def _covered(out: Tensor, weights: LoraWeights) -> bool:
    return out.stride(1) == 1 and len(weights.widths) <= 3 and weights.a.shape[1] <= MAX_WIDTH


def _padded(size: int) -> int:
    """The smallest power of two that is at least `size` and that tl.dot supports."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def _shares(tiles: int, in_features: int, device: torch.device) -> int:
    """The number of shares of the inputs: enough programs for all processors, and at least BLOCK_K inputs a share."""
    idle: int = triton.next_power_of_2(device_properties(device).processors // max(1, tiles))
    return max(1, min(MAX_SHARES, idle, in_features // BLOCK_K))
