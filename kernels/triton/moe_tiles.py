"""Products of tiles of many rows with the bfloat16 weights of the tiles' experts, for targets with descriptors.

Descriptors copy the weights asynchronously. A tile with at most half of the rows is computed as a tile of half the
height. moe_product.py has the products for all other sizes, formats and devices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .moe_product import Blocks, Rows, _gated
from .widen import Quantised


@triton.jit
def _tile(
    out, x, rows, weights, order, like, expert, start, stop, block, width, in_features, x_stride, out_stride,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of outputs of the tile with the positions from `start` to stop - 1, at most BLOCK_M of them."""
    HALVES: tl.constexpr = 2 if GATE >= 0 else 1
    STORED: tl.constexpr = BLOCK_N // HALVES
    position = start + tl.arange(0, BLOCK_M)
    live = position < stop
    choice = tl.load(order + position, mask=live, other=0)
    first = block * STORED
    k = tl.arange(0, BLOCK_K)
    from_x = x + (choice // TOP_K).to(tl.int64)[:, None] * x_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for base in range(0, in_features, BLOCK_K):
        if GATE >= 0:
            activations = tl.load(from_x + (base + k)[None, :], mask=live[:, None], other=0)
            weight = weights.load([expert, 0, first, base]).reshape(BLOCK_N, BLOCK_K)
        else:
            activations = rows.load([start, base])
            weight = weights.load([expert * width + first, base])
        sums = tl.dot(activations, tl.trans(weight), sums, input_precision="ieee")
    to_row = choice
    if GATE >= 0:
        to_row = position
        halves = sums.to(like.dtype.element_ty).to(tl.float32).reshape(BLOCK_M, 2, STORED).permute(0, 2, 1)
        gate, up = tl.split(halves)
        sums = _gated(gate, up, GATE)
    column = first + tl.arange(0, STORED)
    to = out + to_row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=live[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["tile_count", "first_expert", "end_expert"])
def tiles_kernel(
    out, x, tall, low, weights, order, tiles, like, tile_count, first_expert, end_expert,
    width, in_features, x_stride, out_stride,
    TOP_K: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of outputs, tiles. Most arguments are those of moe_product.grouped_kernel.

    `tall`, `low`: descriptors of x for a tile and for half a tile; None with a gate, because the rows of a tile are
    then not contiguous. `weights`: a descriptor of [experts, 2, width, in_features] with a gate, of [experts * width,
    in_features] without, for the experts from first_expert to end_expert - 1; tiles of other experts are left out. The
    outputs of a block after the last output of an expert are not stored.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile)
    if (expert < first_expert) | (expert >= end_expert):
        return
    expert -= first_expert
    start = tl.load(tiles + tile_count + tile)
    stop = tl.load(tiles + 2 * tile_count + tile)
    block = tl.program_id(0)
    if stop - start <= BLOCK_M // 2:
        _tile(
            out, x, low, weights, order, like, expert, start, stop, block, width, in_features, x_stride, out_stride,
            TOP_K, GATE, BLOCK_M // 2, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _tile(
            out, x, tall, weights, order, like, expert, start, stop, block, width, in_features, x_stride, out_stride,
            TOP_K, GATE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


def supports_tiles(weight: Quantised, bias: Tensor | None, experts: int, blocks: Blocks) -> bool:
    """True if `multiply_tiles` supports the arguments."""
    data = weight.data
    has_blocks = weight.in_features % blocks.k == 0 and weight.out_features // experts >= blocks.n
    is_aligned = data.data_ptr() % 16 == 0 and data.stride(0) % 8 == 0  # copies begin at multiples of 16 bytes
    return weight.format == "dense" and data.dtype == torch.bfloat16 and bias is None and has_blocks and is_aligned


def multiply_tiles(
    out: Tensor, x: Tensor, weight: Quantised, rows: Rows, blocks: Blocks, part: range, like: Tensor, gate: int
) -> None:
    """Writes the product of x with bfloat16 weights into `out`, as moe_product.grouped does. `part`: the experts whose
    weights `weight` has; the rows of other experts are not written."""
    assert rows.order is not None
    halves = 2 if gate >= 0 else 1
    stored = blocks.n // halves
    experts = len(part)
    width = weight.out_features // experts // halves
    in_features = weight.in_features
    data = weight.data
    pitch = data.stride(0)
    if gate >= 0:
        strides = [2 * width * pitch, width * pitch, pitch, 1]
        weights = TensorDescriptor(data, [experts, 2, width, in_features], strides, [1, 2, stored, blocks.k])
    else:
        weights = TensorDescriptor(data, [experts * width, in_features], [pitch, 1], [stored, blocks.k])
    tall = low = None
    if gate < 0:
        tall, low = (TensorDescriptor.from_tensor(x, [height, blocks.k]) for height in (blocks.m, blocks.m // 2))
    tiles_kernel[(triton.cdiv(width, stored), rows.tile_count)](
        out, x, tall, low, weights, rows.order, rows.tiles, like, rows.tile_count, part.start, part.stop,
        width, in_features, x.stride(0), out.stride(0), rows.top_k, gate, blocks.m, blocks.n, blocks.k,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
