"""Products of up to 16 rows with int8, int4 and fp8 weights, which are read once and dequantised in registers.

A program multiplies all rows with BLOCK_N outputs over one share of the inputs (split-K). For each block of outputs,
the program that finishes last adds the shares in a fixed order, so the result does not depend on timing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .target import counters, described
from .widen import e4m3, nibbles, record_of, records_of

Format = Literal["int8", "int4", "fp8"]

MAX_ROWS = 16  # rows
# The product of two int8 values is at most 127² < 2^14, so a sum of 2^17 products is exact in an int32.
MAX_IN_FEATURES = 2**17
COUNTERS = 1 << 14


@triton.jit(do_not_specialize=["rows"])
def small_batch_kernel(
    out, x, x_scale, data, scale, zero, bias, partial, counters,
    rows, out_features, in_features, subs, sub, x_stride, pitch, share,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, PTX: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: shares of `share` inputs, blocks of outputs.

    A record is the scale, and for int4 the zero point, of `sub` inputs of an output. A block of BLOCK_K inputs lies in
    one record; ONE: each output has one record. EVEN: every share is a multiple of UNROLL * BLOCK_K inputs. With SPLIT,
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
        for turn in tl.static_range(UNROLL):
            base = first + turn * BLOCK_K
            if not ONE:  # prefetch the record of the next block
                factor = next_factor
                shift = next_shift
                after = tl.minimum((base + BLOCK_K) // sub, subs - 1)
                next_factor, next_shift = record_of(
                    scale, zero, near, after, out_features, subs, FORMAT == "int4", RECORDS
                )
            k = base + tl.arange(0, BLOCK_K)
            wanted = live[:, None]
            if not EVEN:
                wanted = wanted & (k < stop)[None, :]
            activations = tl.load(from_x + k[None, :], mask=wanted, other=0)
            if FORMAT == "int4":
                at = base // 2 + tl.arange(0, BLOCK_K // 2)
                if EVEN:
                    pair = tl.load(from_data + at[None, :])
                else:
                    pair = tl.load(from_data + at[None, :], mask=(2 * at < stop)[None, :], other=0)
                even, odd = tl.split(activations.reshape(BLOCK_M, BLOCK_K // 2, 2))
                low, high = nibbles(pair, shift, activations.dtype, PTX)
                if ONE:
                    sums = tl.dot(even, tl.trans(low), sums, input_precision="ieee")
                    sums = tl.dot(odd, tl.trans(high), sums, input_precision="ieee")
                else:
                    product = tl.dot(even, tl.trans(low), input_precision="ieee")
                    product = tl.dot(odd, tl.trans(high), product, input_precision="ieee")
                    sums += product * factor[None, :]
            else:
                if EVEN:
                    byte = tl.load(from_data + k[None, :])
                else:
                    byte = tl.load(from_data + k[None, :], mask=(k < stop)[None, :], other=0)
                if FORMAT == "int8":
                    sums = tl.dot(activations, tl.trans(byte), sums, out_dtype=tl.int32)
                elif ONE:
                    sums = tl.dot(
                        activations, tl.trans(e4m3(byte, activations.dtype, PTX)), sums, input_precision="ieee"
                    )
                else:
                    product = tl.dot(activations, tl.trans(e4m3(byte, activations.dtype, PTX)), input_precision="ieee")
                    sums += product * factor[None, :]
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
            sums = tl.zeros((BLOCK_M, BLOCK_N), sums.dtype)
            for other in tl.range(0, shares, 4, num_stages=1):
                for turn in tl.static_range(4):
                    some = inside & (other + turn < shares)
                    sums += tl.load(partial + (other + turn) * size + place, mask=some, other=0)
        result = sums.to(tl.float32)
        if FORMAT == "int8":
            result *= tl.load(x_scale + row, mask=live, other=0.0)[:, None] * factor[None, :]
        elif ONE:
            result *= factor[None, :]
        if HAS_BIAS:
            result += tl.load(bias + near).to(tl.float32)[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


class Blocks(NamedTuple):
    """The block sizes of a program, and its launch options: each iteration reads `unroll` blocks of n outputs × k
    inputs."""

    n: int
    k: int
    unroll: int
    warps: int
    stages: int


def blocks_of(fmt: Format, sub: int, in_features: int, wide: bool, amd: bool = False) -> Blocks:
    """The block sizes for a weight format.

    `wide`: the activations are float32, which tensor cores do not multiply. The sizes for `amd` are not tuned; they
    avoid register spills.
    """
    k = 128 if sub >= in_features or sub % 128 == 0 else 64 if sub % 64 == 0 else 32
    if wide:
        return Blocks(32, 32, 1, 4, 2)
    if amd:
        return Blocks(64, 64 if fmt == "int8" else 32, 1, 4, 2)
    if fmt == "int8":
        return Blocks(64, 256, 1, 4, 3)
    unroll = 1 if in_features % 128 else 128 // k  # masks need more registers
    return Blocks(128, k, unroll, 4, 3) if fmt == "int4" else Blocks(64, k, unroll, 4, 3)


def shares_of(blocks: int, steps: int, processors: int) -> int:
    """The number of shares that `steps` blocks of inputs are split into, so that each processor has almost two
    programs."""
    shares = 1
    while blocks * shares < 1.75 * processors and 4 * shares <= steps:
        shares *= 2
    return shares


def small_batch(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    fmt: Format,
    out_features: int,
    sub: int,
    x_scale: Tensor | None = None,
) -> Tensor:
    """x [1…16 rows, in_features] times the weight [out_features, in_features] -> [rows, out_features] in `dtype`.

    Each record (scale, and for int4 zero point) covers `sub` inputs, a multiple of 32 or all inputs. With int8
    activations, x_scale [rows] float32 are their scales.
    """
    rows, in_features = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(rows, out_features, dtype=dtype)
    records = records_of(scale, transposed=False)
    device = described(x.device)
    ptx = device.compiler == "cuda"  # inline PTX converts four bytes with fewer instructions than Triton generates
    n, k, unroll, warps, stages = blocks_of(
        fmt, sub, in_features, x.dtype == torch.float32, amd=device.compiler == "hip"
    )
    step = k * unroll
    blocks = triton.cdiv(out_features, n)
    steps = triton.cdiv(in_features, step)
    shares = shares_of(blocks, steps, device.processors)
    share = triton.cdiv(steps, shares) * step
    shares = triton.cdiv(in_features, share)
    kind = torch.int32 if fmt == "int8" else torch.float32
    partial = x.new_empty(shares, rows, out_features, dtype=kind) if shares > 1 else out
    small_batch_kernel[(shares, blocks)](
        out, x, scale if x_scale is None else x_scale, data, scale, scale if zero is None else zero,
        scale if bias is None else bias, partial, counters(x.device, COUNTERS),
        rows, out_features, in_features, triton.cdiv(in_features, sub), min(sub, in_features),
        x.stride(0), data.stride(0), share,
        fmt, records, sub >= in_features, in_features % step == 0, shares > 1, bias is not None, ptx, unroll,
        MAX_ROWS, n, k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
