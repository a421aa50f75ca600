"""Products of the rows of a tile with the weights of the tile's expert, for all weight formats.

The weights of all experts are one weight, in which expert e has the outputs from e * out_features on.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.moe import ExpertGate
from .overlap import follow_previous, overlapping
from .small_batch import _add_bytes
from .widen import Quantised, e2m1, nibbles, record_of

GATES: tuple[ExpertGate, ...] = get_args(ExpertGate)


@triton.jit
def _gated(gate, up, KIND: tl.constexpr):
    """The gated activation KIND, an index in GATES, of float32 values."""
    if KIND == 0:
        result = gate * tl.sigmoid(gate) * up
    elif KIND == 1:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == 2:  # (1 + tanh y) / 2 is the sigmoid of 2 y
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        result = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    return result


@triton.jit
def _add(
    sums, activations, data, scale, zero, output, base, all_features, in_features, subs, sub, pitch,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums + activations * weights, for BLOCK_K inputs from index `base` on. All of them have the same scale."""
    k = base + tl.arange(0, BLOCK_K)
    from_data = data + output.to(tl.int64)[:, None] * pitch
    factor = tl.zeros(output.shape, tl.float32)
    shift = factor
    if not ONE or FORMAT == "int4":
        factor, shift = record_of(scale, zero, output, base // sub, all_features, subs, FORMAT == "int4", RECORDS)
    if FORMAT == "dense":
        if EVEN:
            weight = tl.load(from_data + k[None, :])
        else:
            weight = tl.load(from_data + k[None, :], mask=(k < in_features)[None, :], other=0.0)
        sums = tl.dot(activations, tl.trans(weight), sums, input_precision="ieee")
    elif FORMAT == "int4":
        byte = tl.arange(0, BLOCK_K // 2)
        if RECORDS == "transposed":  # outputs are padded to whole chunks
            words: tl.constexpr = BLOCK_K // 32
            word = byte // 4 // words * 4 + base % 128 // 32 + byte // 4 % words
            pair = tl.load(from_data + (base // 128 * 64 + word * 4 + byte % 4)[None, :])
        elif EVEN:
            pair = tl.load(from_data + (base // 2 + byte)[None, :])
        else:
            pair = tl.load(
                from_data + (base // 2 + byte)[None, :], mask=(base + 2 * byte < in_features)[None, :], other=0
            )
        even, odd = tl.split(activations.reshape(BLOCK_M, BLOCK_K // 2, 2))
        if RECORDS == "exponents":
            low = e2m1(pair, activations.dtype)
            high = e2m1(pair >> 4, activations.dtype)
        else:
            low, high = nibbles(pair, shift, activations.dtype, ASSEMBLY)
        product = tl.dot(even, tl.trans(low), input_precision="ieee")
        product = tl.dot(odd, tl.trans(high), product, input_precision="ieee")
        sums += product * factor[None, :]
    else:
        sums = _add_bytes(sums, activations, from_data, k, in_features, factor, FORMAT, ONE, EVEN, ASSEMBLY)
    return sums


@triton.jit
def _inputs(base, FORMAT: tl.constexpr, RECORDS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The indices of BLOCK_K inputs from `base` on, in the order in which _add reads the weights of an output.

    cuda/products/linear.py packs a chunk of 128 inputs of int4 weights as a matrix of 4 x 4 words of 8 inputs, which it
    transposes. A row of the stored matrix has contiguous bytes. BLOCK_K of 64 reads half of each row.
    """
    k = tl.arange(0, BLOCK_K)
    if FORMAT == "int4" and RECORDS == "transposed":
        words: tl.constexpr = BLOCK_K // 32
        k = k // 8 % words * 32 + k // 8 // words * 8 + k % 8
    return base + k


@triton.jit
def _finished(
    sums, x_scale, row, live, scale, zero, bias, output, all_features, subs,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The sums in float32, times the scales that are not applied yet, plus the bias."""
    result = sums.to(tl.float32)
    if ONE and (FORMAT == "int8" or FORMAT == "fp8"):
        factor, _ = record_of(scale, zero, output, 0, all_features, subs, False, RECORDS)
        if FORMAT == "int8":
            result *= tl.load(x_scale + row, mask=live, other=0.0)[:, None] * factor[None, :]
        else:
            result *= factor[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["tile_count", "first_expert", "end_expert"])
def grouped_kernel(
    out, x, x_scale, data, scale, zero, bias, order, tiles, like,
    tile_count, first_expert, end_expert, out_features, all_features, in_features, subs, sub,
    x_stride, out_stride, pitch,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr, SORTED: tl.constexpr, TOP_K: tl.constexpr, GATE: tl.constexpr, FROM_CHOICE: tl.constexpr,
    TO_CHOICE: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BLOCK_N outputs, tiles. `data` has the weights of the experts from first_expert to
    end_expert - 1; tiles of other experts are left out.

    Not SORTED: tile i is choice i, and `tiles` has its expert. FROM_CHOICE: the input row of a choice is its token,
    choice // TOP_K; else the row of its position. TO_CHOICE: the output row is the choice; else the position. GATE ≥ 0:
    the first half of the outputs are gates of the second half; both are rounded to the type of `like` first. The first
    half of the outputs of a block are then gates, too.
    """
    follow_previous(OVERLAP)
    tile = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    expert = tl.load(tiles + tile).to(tl.int64)
    if (expert < first_expert) | (expert >= end_expert):
        return
    if SORTED:
        position = tl.load(tiles + tile_count + tile) + lane
        live = position < tl.load(tiles + 2 * tile_count + tile)
        choice = tl.load(order + position, mask=live, other=0)
    else:
        position = tile + lane * 0
        live = lane == 0
        choice = position
    row = (choice // TOP_K if FROM_CHOICE else position).to(tl.int64)
    from_x = x + row[:, None] * x_stride
    HALVES: tl.constexpr = 2 if GATE >= 0 else 1
    STORED: tl.constexpr = BLOCK_N // HALVES
    width = out_features // HALVES  # outputs that are stored
    within = tl.arange(0, BLOCK_N)
    near = tl.minimum(tl.program_id(0) * STORED + within % STORED, width - 1)  # padding repeats the last output
    output = expert * out_features + within // STORED * width + near
    stored_output = output - first_expert * out_features
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if FORMAT == "int8" else tl.float32)
    for base in range(0, in_features, BLOCK_K):
        k = _inputs(base, FORMAT, RECORDS, BLOCK_K)
        readable = live[:, None]
        if not EVEN:
            readable = readable & (k < in_features)[None, :]
        activations = tl.load(from_x + k[None, :], mask=readable, other=0)
        sums = _add(
            sums, activations, data, scale, zero, stored_output, base, all_features, in_features, subs, sub, pitch,
            FORMAT, RECORDS, ONE, EVEN, ASSEMBLY, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    result = _finished(
        sums, x_scale, row, live, scale, zero, bias, output, all_features, subs, FORMAT, RECORDS, ONE, HAS_BIAS
    )
    if GATE >= 0:
        dtype = like.dtype.element_ty
        halves = result.to(dtype).to(tl.float32).reshape(BLOCK_M, 2, STORED).permute(0, 2, 1)
        gate, up = tl.split(halves)
        result = _gated(gate, up, GATE)
    column = tl.program_id(0) * STORED + tl.arange(0, STORED)
    to_row = (choice if TO_CHOICE else position).to(tl.int64)
    inside = live[:, None] & (column < width)[None, :]
    tl.store(out + to_row[:, None] * out_stride + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(out, y, weights, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Program (token, block): the sum over a token's choices of weight * y, in float32, in the order of the choices."""
    follow_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    sums = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        value = tl.load(y + choice * hidden + column, mask=inside, other=0.0).to(tl.float32)
        sums += tl.load(weights + choice) * value
    tl.store(out + token * hidden + column, sums.to(out.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """The block sizes of a program, and its launch options."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class Rows(NamedTuple):
    """The rows of the tiles of a product."""

    tiles: Tensor  # as in Sorted; not sorted: [choices], the expert of each choice
    order: Tensor | None  # as in Sorted; None: not sorted
    top_k: int
    overlap: bool = False  # whether a kernel may start before the previous kernel has ended
    has_tma: bool = False  # whether moe_tiles.py computes products of tiles of many rows

    @property
    def tile_count(self) -> int:
        """The number of tiles."""
        return self.tiles.shape[-1]


def grouped(
    out: Tensor, x: Tensor, x_scale: Tensor | None, weight: Quantised, bias: Tensor | None, rows: Rows, blocks: Blocks,
    experts: int, like: Tensor, assembly: bool, gate: int = -1, part: range | None = None,
) -> None:  # fmt: skip
    """Writes the product of x with the experts' weights into `out`.

    With a gate: x [tokens, in_features] -> out [choices, out_features / 2], in the order of positions. Without:
    x [choices, in_features] in the order of positions -> out [choices, out_features] in the order of choices. `part`:
    the experts that `weight` has; None: all.
    """
    part = part or range(experts)
    out_features = weight.out_features // len(part)
    in_features = weight.in_features
    # The kernel does not read the arguments that are None here; it receives another tensor in their place.
    scale = weight.scale
    zero = scale if weight.zero is None else weight.zero
    grouped_kernel[(triton.cdiv(out_features, blocks.n), rows.tile_count)](
        out, x, scale if x_scale is None else x_scale, weight.data, scale, zero, scale if bias is None else bias,
        rows.tiles if rows.order is None else rows.order, rows.tiles, like,
        rows.tile_count, part.start, part.stop, out_features, weight.out_features, in_features, weight.subs,
        min(weight.sub, in_features),
        x.stride(0), out.stride(0), weight.data.stride(0),
        weight.format, weight.records, weight.sub >= in_features, in_features % blocks.k == 0, bias is not None,
        assembly, rows.order is not None, rows.top_k, gate, gate >= 0, gate < 0, rows.overlap,
        blocks.m, blocks.n, blocks.k,
        num_warps=blocks.warps, num_stages=blocks.stages, **overlapping(rows.overlap),
    )  # fmt: skip


def combine(y: Tensor, weights: Tensor, dtype: torch.dtype, overlap: bool = False) -> Tensor:
    """y [tokens * top_k, hidden], weights [tokens, top_k] -> [tokens, hidden] in `dtype`."""
    tokens, top_k = weights.shape
    hidden = y.shape[1]
    out = y.new_empty(tokens, hidden, dtype=dtype)
    block = min(1024, triton.next_power_of_2(hidden))
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        out, y, weights, hidden, top_k, block, overlap, num_warps=4, **overlapping(overlap)
    )
    return out
