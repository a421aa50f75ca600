"""Weights of int4 and fp8 as floats: in registers, or in memory, a part of the outputs at a time.

`turned` int4 weights and records are those of kernels/cuda/linear.py, others those of kernels/ops.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 2**26  # values
BLOCK = 64


@triton.jit
def _nibbles(data, outputs, first, ins, pitch, TURNED: tl.constexpr, BLOCK_K: tl.constexpr, bound):
    """[BLOCK_N, BLOCK_K] whole numbers 0…15 of the inputs from `first` on."""
    at = first // 2 + tl.arange(0, BLOCK_K // 2)
    place = at
    if TURNED:  # words of 64 bytes, a 4 x 4 matrix
        word = at % 64 // 4
        place = at // 64 * 64 + (word % 4 * 4 + word // 4) * 4 + at % 4
    inside = (outputs < bound)[:, None] & (2 * at < ins)[None, :]
    pair = tl.load(data + outputs.to(tl.int64)[:, None] * pitch + place[None, :], mask=inside, other=0)
    return tl.interleave(pair & 15, pair >> 4)


@triton.jit
def _e4m3(data, outputs, first, ins, pitch, BLOCK_K: tl.constexpr, bound):
    """[BLOCK_N, BLOCK_K] float32. The bits of an e4m3 are those of a float 2^120 times smaller."""
    at = first + tl.arange(0, BLOCK_K)
    inside = (outputs < bound)[:, None] & (at < ins)[None, :]
    byte = tl.load(data + outputs.to(tl.int64)[:, None] * pitch + at[None, :], mask=inside, other=0).to(tl.int32)
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def weights_of(
    data, scale, zero, outputs, first, outs, ins, subs, sub, pitch,
    NIBBLES: tl.constexpr, TURNED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """([BLOCK_N, BLOCK_K], [BLOCK_N] scales) float32 of BLOCK_K inputs from `first` on, all of one record of `sub`."""
    there = outputs < outs
    part = first // sub
    if TURNED:
        place = (outputs // 8 * subs + part) * 8 + outputs % 8
    else:
        place = outputs * subs + part
    if NIBBLES:
        whole = _nibbles(data, outputs, first, ins, pitch, TURNED, BLOCK_K, outs).to(tl.float32)
        if TURNED:
            record = tl.load(scale + place, mask=there, other=0)
            factor = (record & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            weights = whole - (record >> 16).to(tl.float32)[:, None]
        else:
            factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
            weights = whole - tl.load(zero + place, mask=there, other=0).to(tl.float32)[:, None]
    else:
        factor = tl.load(scale + place, mask=there, other=0.0)
        weights = _e4m3(data, outputs, first, ins, pitch, BLOCK_K, outs)
    return weights, factor


@triton.jit
def _widen(
    out, data, scale, zero, start, outs, ins, subs, sub, pitch,
    NIBBLES: tl.constexpr, TURNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of out [outs - start, ins]: the weights of the outputs from `start` on."""
    within = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) * BLOCK_K
    weights, factor = weights_of(
        data, scale, zero, start + within, first, outs, ins, subs, sub, pitch, NIBBLES, TURNED, BLOCK_K
    )
    k = first + tl.arange(0, BLOCK_K)
    to = out + within.to(tl.int64)[:, None] * ins + k[None, :]
    inside = (start + within < outs)[:, None] & (k < ins)[None, :]
    tl.store(to, (weights * factor[:, None]).to(out.dtype.element_ty), mask=inside)


def widened(
    data: Tensor, scale: Tensor, zero: Tensor | None, outs: int, ins: int, sub: int, dtype: torch.dtype,
    turned: bool, nibbles: bool,
) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
    """(first output, [outputs, ins] of dtype) over all outputs of a weight; the memory of one is used by the next."""
    each = max(BLOCK, AT_ONCE // ins // BLOCK * BLOCK)
    parts = -(-outs // each)
    each = -(-outs // parts // BLOCK) * BLOCK  # of a size
    out = data.new_empty(min(each, outs), ins, dtype=dtype)
    depth = 64 if sub >= ins or sub % 64 == 0 else 32
    for start in range(0, outs, each):
        there = min(each, outs - start)
        _widen[(triton.cdiv(ins, depth), triton.cdiv(there, BLOCK))](
            out, data, scale, zero if zero is not None else scale, start, min(outs, start + each), ins, -(-ins // sub),
            sub, data.stride(0), nibbles, turned, BLOCK, depth, num_warps=4,
        )  # fmt: skip
        yield start, out[:there]
