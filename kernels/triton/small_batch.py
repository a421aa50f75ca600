"""Products of up to 16 rows with int8, int4 and fp8 weights, which are read once and dequantised in registers.

A program multiplies all rows with BLOCK_N outputs over one share of the inputs (split-K). For each block of outputs,
the last program to finish adds the sums of all shares in a fixed order, so the result does not depend on timing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .target import Target, counters, device_properties
from .widen import Format, Quantised, block_inputs, e4m3, nibbles, record_of

MAX_ROWS = 16
# The product of two int8 values is at most 127² < 2^14, so a sum of 2^17 products is exact in an int32.
MAX_IN_FEATURES = 2**17
COUNTERS = 1 << 14


@triton.jit
def _add_int4(
    sums, activations, from_data, base, stop, factor, shift,
    ONE: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """sums + activations * weights, for BLOCK_K int4 inputs from index `base` on."""
    byte = base // 2 + tl.arange(0, BLOCK_K // 2)
    if EVEN:
        pair = tl.load(from_data + byte[None, :])
    else:
        pair = tl.load(from_data + byte[None, :], mask=(2 * byte < stop)[None, :], other=0)
    even, odd = tl.split(activations.reshape(BLOCK_M, BLOCK_K // 2, 2))
    low, high = nibbles(pair, shift, activations.dtype, ASSEMBLY)
    if ONE:
        sums = tl.dot(even, tl.trans(low), sums, input_precision="ieee")
        sums = tl.dot(odd, tl.trans(high), sums, input_precision="ieee")
    else:
        product = tl.dot(even, tl.trans(low), input_precision="ieee")
        product = tl.dot(odd, tl.trans(high), product, input_precision="ieee")
        sums += product * factor[None, :]
    return sums


@triton.jit
def _add_bytes(
    sums, activations, from_data, k, stop, factor,
    FORMAT: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """sums + activations * weights, for the int8 or fp8 inputs with the indices k."""
    if EVEN:
        byte = tl.load(from_data + k[None, :])
    else:
        byte = tl.load(from_data + k[None, :], mask=(k < stop)[None, :], other=0)
    if FORMAT == "int8":
        sums = tl.dot(activations, tl.trans(byte), sums, out_dtype=tl.int32)
    elif ONE:
        sums = tl.dot(activations, tl.trans(e4m3(byte, activations.dtype, ASSEMBLY)), sums, input_precision="ieee")
    else:
        product = tl.dot(activations, tl.trans(e4m3(byte, activations.dtype, ASSEMBLY)), input_precision="ieee")
        sums += product * factor[None, :]
    return sums


@triton.jit
def _add_shares(sums, partial, shares, size, place, inside):
    """The sums of all shares, added in the order of the shares."""
    sums = tl.zeros(sums.shape, sums.dtype)
    for first in tl.range(0, shares, 4, num_stages=1):
        for offset in tl.static_range(4):
            present = inside & (first + offset < shares)
            sums += tl.load(partial + (first + offset) * size + place, mask=present, other=0)
    return sums


@triton.jit
def _scaled(
    sums, x_scale, row, live, factor, bias, output,
    FORMAT: tl.constexpr, ONE: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The sums in float32, times the scales that are not applied yet, plus the bias."""
    result = sums.to(tl.float32)
    if FORMAT == "int8":
        result *= tl.load(x_scale + row, mask=live, other=0.0)[:, None] * factor[None, :]
    elif ONE:
        result *= factor[None, :]
    if HAS_BIAS:
        result += tl.load(bias + output).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=["rows"])
def small_batch_kernel(
    out, x, x_scale, data, scale, zero, bias, partial, counters,
    rows, out_features, in_features, subs, sub, x_stride, pitch, share,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ASSEMBLY: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: shares of `share` inputs, blocks of outputs.

    `sub` inputs of an output share a scale, and for int4 a zero point. All BLOCK_K inputs of a block have the same
    scale; ONE: each output has one scale. EVEN: every share is a multiple of UNROLL * BLOCK_K inputs. With SPLIT,
    partial [shares, rows, out_features] receives the sums of each share, and counters [blocks] are zero before and
    after the launch. x_scale [rows] are the scales of int8 activations.
    """
    part = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    live = row < rows
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < out_features
    near = tl.minimum(output, out_features - 1)  # padding outputs read the last output's weights and are not stored
    from_x = x + row.to(tl.int64)[:, None] * x_stride
    from_data = data + near.to(tl.int64)[:, None] * pitch
    start = part * share
    stop = tl.minimum(start + share, in_features)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if FORMAT == "int8" else tl.float32)
    next_factor, next_shift = record_of(scale, zero, near, start // sub, out_features, subs, FORMAT == "int4", RECORDS)
    factor = next_factor
    shift = next_shift
    for first in range(start, stop, BLOCK_K * UNROLL):
        for index in tl.static_range(UNROLL):
            base = first + index * BLOCK_K
            if not ONE:  # prefetch scale and zero point of the next block
                factor = next_factor
                shift = next_shift
                after = tl.minimum((base + BLOCK_K) // sub, subs - 1)
                next_factor, next_shift = record_of(
                    scale, zero, near, after, out_features, subs, FORMAT == "int4", RECORDS
                )
            k = base + tl.arange(0, BLOCK_K)
            readable = live[:, None]
            if not EVEN:
                readable = readable & (k < stop)[None, :]
            activations = tl.load(from_x + k[None, :], mask=readable, other=0)
            if FORMAT == "int4":
                sums = _add_int4(
                    sums, activations, from_data, base, stop, factor, shift, ONE, EVEN, ASSEMBLY, BLOCK_M, BLOCK_K
                )
            else:
                sums = _add_bytes(sums, activations, from_data, k, stop, factor, FORMAT, ONE, EVEN, ASSEMBLY)
    place = row.to(tl.int64)[:, None] * out_features + output[None, :]
    inside = live[:, None] & there[None, :]
    last = True
    if SPLIT:
        shares = tl.num_programs(0)
        size = rows.to(tl.int64) * out_features
        tl.store(partial + part * size + place, sums, mask=inside)
        tl.debug_barrier()  # all threads have written their sums before the counter is incremented
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == shares - 1
    if last:
        if SPLIT:
            tl.store(counters + block, 0)
            sums = _add_shares(sums, partial, shares, size, place, inside)
        result = _scaled(sums, x_scale, row, live, factor, bias, near, FORMAT, ONE, HAS_BIAS)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """The block sizes of a program, and its launch options. Each iteration reads `unroll` blocks of n outputs × k
    inputs."""

    n: int
    k: int
    unroll: int
    warps: int
    stages: int


def blocks_of(format: Format, sub: int, in_features: int, wide: bool, target: Target) -> Blocks:
    """The block sizes for a weight format.

    `wide`: the activations are float32, which tensor cores do not multiply. The sizes for operands in registers are
    not tuned; they avoid register spills.
    """
    if wide:
        return Blocks(n=32, k=32, unroll=1, warps=4, stages=2)
    if target.in_registers:
        return Blocks(n=64, k=64 if format == "int8" else 32, unroll=1, warps=4, stages=2)
    if format == "int8":
        return Blocks(n=64, k=256, unroll=1, warps=4, stages=3)
    k = block_inputs(sub, in_features, 128)
    unroll = 1 if in_features % 128 else 128 // k  # 1 if loads are masked, because masks need registers
    return Blocks(n=128 if format == "int4" else 64, k=k, unroll=unroll, warps=4, stages=3)


def shares_of(blocks: int, steps: int, processors: int) -> int:
    """The number of shares to divide `steps` blocks of inputs into, so that each processor has almost two programs."""
    shares = 1
    while blocks * shares < 1.75 * processors and 4 * shares <= steps:
        shares *= 2
    return shares


def small_batch(
    x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype, x_scale: Tensor | None = None
) -> Tensor:
    """x [1…16 rows, in_features] times the weight -> [rows, out_features] in `dtype`.

    For an int8 weight x is int8, and x_scale [rows] float32 has the scales of x.
    """
    rows, in_features = x.shape
    format, data, scale, zero, out_features, _, sub, records = weight
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(rows, out_features, dtype=dtype)
    device = device_properties(x.device)
    launch = blocks_of(format, sub, in_features, x.dtype == torch.float32, device.target)
    step = launch.k * launch.unroll
    blocks = triton.cdiv(out_features, launch.n)
    steps = triton.cdiv(in_features, step)
    shares = shares_of(blocks, steps, device.processors)
    share = triton.cdiv(steps, shares) * step
    shares = triton.cdiv(in_features, share)
    kind = torch.int32 if format == "int8" else torch.float32
    partial = x.new_empty(shares, rows, out_features, dtype=kind) if shares > 1 else out
    # The kernel does not read the arguments that are None here; it receives `scale` in their place.
    x_scale, zero, shift = (scale if tensor is None else tensor for tensor in (x_scale, zero, bias))
    small_batch_kernel[(shares, blocks)](
        out, x, x_scale, data, scale, zero, shift, partial, counters(x.device, COUNTERS),
        rows, out_features, in_features, weight.subs, min(sub, in_features), x.stride(0), data.stride(0), share,
        format, records, sub >= in_features, in_features % step == 0, shares > 1, bias is not None,
        device.target.assembly, launch.unroll,
        MAX_ROWS, launch.n, launch.k, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
