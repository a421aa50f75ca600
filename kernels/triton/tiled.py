"""Products of up to 128 rows with int4 weights, and of 17 to 128 rows with fp8 weights, for 16-bit activations.

A program multiplies BLOCK_M rows with BLOCK_N outputs over one share of the inputs (split-K, as in small_batch.py).
With more than 16 rows, the weights are the first operand of `tl.dot`, which may stay in registers; the second one is in
shared memory. A block of 128 inputs is two halves of 64. For int4, a byte has one input of each half, so that the
activations of a half are contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nvidia.assembly import HALVES, SCALED_HALVES
from .small_batch import COUNTERS, shares_of
from .target import Device, counters, device_properties
from .widen import HALF, Quantised, e4m3, record_of

FEW_ROWS = 16  # the activations are the first operand
MAX_ROWS = 128  # for more rows it is faster to dequantise the weight into memory
DEEP_SHARED = 163 << 10  # bytes of shared memory that fit four stages
SIZE = HALF.value


@triton.jit
def halves_of_nibbles(
    pair, zeros, high_zeros, factor, high_factor, dtype: tl.constexpr, SCALED: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """(low nibbles, high nibbles) of the bytes `pair` [BLOCK_N, HALF], minus their zero points, as `dtype`. SCALED:
    times their scales. Zero points and scales are [BLOCK_N] float32."""
    if ASSEMBLY and dtype == tl.bfloat16:
        pair, less = tl.broadcast(pair, (-128.0 - zeros).to(dtype)[:, None])
        pair, more = tl.broadcast(pair, (-128.0 - high_zeros).to(dtype)[:, None])
        if SCALED:
            pair, scales = tl.broadcast(pair, factor.to(dtype)[:, None])
            pair, high_scales = tl.broadcast(pair, high_factor.to(dtype)[:, None])
            low, high = tl.inline_asm_elementwise(
                SCALED_HALVES, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r", [pair, less, more, scales, high_scales],
                (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                HALVES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [pair, less, more],
                (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:  # a nibble in the lowest mantissa bits of 2^23 is the float 2^23 + nibble
        low = ((pair & 15).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zeros + 8388608.0)[:, None]
        high = ((pair >> 4).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (high_zeros + 8388608.0)[:, None]
        if SCALED:
            low = low * factor[:, None]
            high = high * high_factor[:, None]
        low = low.to(dtype)
        high = high.to(dtype)
    return low, high


@triton.jit
def load_weights(
    from_data, first, shift, far_shift, factor, far_factor,
    dtype: tl.constexpr, NIBBLES: tl.constexpr, SCALED: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """The halves of the block of inputs at `first`, each [BLOCK_N, HALF]: see halves_of_nibbles."""
    index = tl.arange(0, HALF)[None, :]
    if NIBBLES:
        pair = tl.load(from_data + first // 2 + index)
        low, high = halves_of_nibbles(pair, shift, far_shift, factor, far_factor, dtype, SCALED, ASSEMBLY)
    else:
        low = e4m3(tl.load(from_data + first + index), dtype, ASSEMBLY)
        high = e4m3(tl.load(from_data + first + HALF + index), dtype, ASSEMBLY)
    return low, high


@triton.jit
def load_rows(from_x, k, row, live, x_stride, WEIGHTS_FIRST: tl.constexpr):
    """The inputs k of the rows, as `add_product` reads them: [inputs, rows] if WEIGHTS_FIRST, else [rows, inputs]."""
    if WEIGHTS_FIRST:
        return tl.load(from_x + row.to(tl.int64)[None, :] * x_stride + k[:, None], mask=live[None, :], other=0.0)
    else:
        return tl.load(from_x + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=live[:, None], other=0.0)


@triton.jit
def add_product(sums, weights, activations, factor, WEIGHTS_FIRST: tl.constexpr, SCALED: tl.constexpr):
    """sums + the product, times the scales `factor` [BLOCK_N] unless the weights are SCALED."""
    if WEIGHTS_FIRST:
        if SCALED:
            sums = tl.dot(weights, activations, sums, input_precision="ieee")
        else:
            sums += tl.dot(weights, activations, input_precision="ieee") * factor[:, None]
    else:
        sums += tl.dot(activations, tl.trans(weights), input_precision="ieee") * factor[None, :]
    return sums


@triton.jit(do_not_specialize=["rows"])
def tiled_kernel(
    out, x, data, scale, zero, bias, partial, counters,
    rows, out_features, in_features, subs, sub, x_stride, pitch, share,
    NIBBLES: tl.constexpr, RECORDS: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, shares of `share` inputs, blocks of outputs.

    NIBBLES: the weight is int4, and the inputs of a half have the same scale; else it is fp8, and the inputs of both
    halves have the same scale. `partial` and `counters`: as in small_batch_kernel.
    """
    SCALED: tl.constexpr = NIBBLES and WEIGHTS_FIRST
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    block = tl.program_id(2)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(output, out_features - 1)  # padding outputs read the last output's weights and are not stored
    from_data = data + near.to(tl.int64)[:, None] * pitch
    start = part * share
    stop = tl.minimum(start + share, in_features)
    if WEIGHTS_FIRST:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, stop, 2 * HALF):
        half = first + tl.arange(0, HALF)
        factor, shift = record_of(scale, zero, near, first // sub, out_features, subs, NIBBLES, RECORDS)
        far_factor = factor
        far_shift = shift
        if NIBBLES:
            after = (first + HALF) // sub
            far_factor, far_shift = record_of(scale, zero, near, after, out_features, subs, True, RECORDS)
        x_near = load_rows(x, half, row, live, x_stride, WEIGHTS_FIRST)
        x_far = load_rows(x, half + HALF, row, live, x_stride, WEIGHTS_FIRST)
        low, high = load_weights(
            from_data, first, shift, far_shift, factor, far_factor, dtype, NIBBLES, SCALED, ASSEMBLY
        )
        sums = add_product(sums, low, x_near, factor, WEIGHTS_FIRST, SCALED)
        sums = add_product(sums, high, x_far, far_factor, WEIGHTS_FIRST, SCALED)
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    place = row.to(tl.int64)[:, None] * out_features + output[None, :]
    inside = live[:, None] & (output < out_features)[None, :]
    last = True
    if SPLIT:
        shares = tl.num_programs(1)
        size = rows.to(tl.int64) * out_features
        counter = counters + tile * tl.num_programs(2) + block
        tl.store(partial + part * size + place, sums, mask=inside)
        tl.debug_barrier()  # all threads have written their sums before the counter is incremented
        last = tl.atomic_add(counter, 1, sem="acq_rel") == shares - 1
    if last:
        if SPLIT:
            tl.store(counter, 0)
            sums = tl.zeros(sums.shape, tl.float32)
            for index in range(shares):  # in one order, so that the result does not depend on timing
                sums += tl.load(partial + index * size + place, mask=inside, other=0.0)
        if HAS_BIAS:
            sums += tl.load(bias + near).to(tl.float32)[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """The block sizes of a program, `m` rows and `n` outputs, and its launch options."""

    m: int
    n: int
    warps: int
    stages: int
    weights_first: bool = True


def blocks_of(rows: int, is_int4: bool, device: Device) -> Blocks:
    """The block sizes: tuned on H200. The others avoid register spills."""
    if device.target.in_registers:
        return Blocks(16 if rows <= FEW_ROWS else 32, 64, 4, 2)
    is_deep = device.shared >= DEEP_SHARED
    stages = 4 if is_deep else 3
    if rows <= FEW_ROWS:
        return Blocks(16, 128, 4, stages, weights_first=False)
    return Blocks(64, 128, 4 if is_deep else 8, stages) if is_int4 else Blocks(64, 64, 4, 4)


def is_divisible(in_features: int, group: int, same: int) -> bool:
    """True if a weight has complete blocks of inputs, and `same` inputs have the same scale."""
    return in_features % (2 * SIZE) == 0 and (group % same == 0 or group >= in_features)


def by_half(data: Tensor) -> Tensor:
    """[outputs, in_features / 2] bytes of Int4 -> byte j of each 64 has the inputs j and j + 64 of 128."""
    nibbles = torch.stack((data & 15, data >> 4), -1).view(len(data), -1, 2, SIZE)
    return (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).view(data.shape)


def in_order(data: Tensor) -> Tensor:
    """The inverse of `by_half`."""
    blocks = data.view(len(data), -1, SIZE)
    nibbles = torch.cat((blocks & 15, blocks >> 4), -1).view(len(data), -1, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4)


def is_supported(x: Tensor, weight: Quantised) -> bool:
    """True if `tiled_product` supports x and the weight, and is the fastest product."""
    rows, in_features = x.shape
    if x.element_size() != 2 or rows > MAX_ROWS:
        return False
    if weight.format == "fp8":
        return rows > FEW_ROWS and is_divisible(in_features, weight.sub, 2 * SIZE)
    return weight.records == "by_half"


def tiled_product(x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [rows, in_features] times the weight -> [rows, out_features] in `dtype`."""
    rows, in_features = x.shape
    out_features = weight.out_features
    x = x if x.stride(-1) == 1 else x.contiguous()
    device = device_properties(x.device)
    m, n, warps, stages, weights_first = blocks_of(rows, weight.format == "int4", device)
    tiles, blocks, steps = triton.cdiv(rows, m), triton.cdiv(out_features, n), in_features // (2 * SIZE)
    share = triton.cdiv(steps, shares_of(tiles * blocks, steps, device.processors)) * 2 * SIZE
    shares = triton.cdiv(in_features, share)
    out = x.new_empty(rows, out_features, dtype=dtype)
    partial = x.new_empty(shares, rows, out_features, dtype=torch.float32) if shares > 1 else out
    zero, shift = (weight.scale if tensor is None else tensor for tensor in (weight.zero, bias))
    tiled_kernel[(tiles, shares, blocks)](
        out, x, weight.data, weight.scale, zero, shift, partial, counters(x.device, COUNTERS),
        rows, out_features, in_features, weight.subs, min(weight.sub, in_features), x.stride(0),
        weight.data.stride(0), share, weight.format == "int4", weight.records, shares > 1, bias is not None,
        device.target.assembly, weights_first, m, n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
