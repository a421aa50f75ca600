"""Dequantises int4 and fp8 weights: in registers, or some outputs into memory.

The scales and zero points of int4 have one of these layouts (RECORDS): `plain`, as in kernels/ops; `by_group`, packed
by linear.py; `by_half`, the same with the nibbles permuted for tiled.py; `transposed`, packed by
cuda/products/linear.py, which permutes the nibbles as well. The scales of int8 and fp8 are plain. MXFP4 is int4 with
the layout `exponents`: nibbles are e2m1 numbers, and a scale is a power of two.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .nvidia.assembly import E4M3_BF16, E4M3_FP16, NIBBLES_BF16, NIBBLES_FP16

Format = Literal["dense", "int8", "int4", "fp8"]
Records = Literal["plain", "by_group", "by_half", "transposed", "exponents"]

BLOCK = 64  # outputs of a program
HALF = tl.constexpr(64)  # `by_half`: byte j of a block of 64 bytes has the inputs j and j + HALF of the block


class Quantised(NamedTuple):
    """A weight [out_features, in_features] as the kernels read it.

    `sub` inputs of an output share a scale, and for int4 a zero point.
    """

    format: Format
    data: Tensor  # [out_features, bytes], int8 for int8, else uint8
    # Scales. If `records` is "by_group", "by_half" or "transposed": scales and zero points, packed as int32; if it is
    # "exponents": uint8.
    scale: Tensor
    zero: Tensor | None  # zero points of int4, if `records` is "plain"
    out_features: int
    in_features: int
    sub: int  # number of inputs with the same scale: a multiple of 32, or all inputs
    records: Records = "plain"

    @property
    def subs(self) -> int:
        """The number of scales of an output."""
        return -(-self.in_features // self.sub)


@triton.jit
def nibbles(pair, zeros, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """(low nibbles, high nibbles) of the bytes `pair` [BLOCK_N, bytes], minus the zero points `zeros` [BLOCK_N], as
    `dtype`."""
    if ASSEMBLY and dtype == tl.bfloat16:
        pair, less = tl.broadcast(pair, (-128.0 - zeros).to(dtype)[:, None])
        low, high = tl.inline_asm_elementwise(
            NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r,r", [pair, less], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif ASSEMBLY and dtype == tl.float16:
        pair, less = tl.broadcast(pair, (-1024.0 - zeros).to(dtype)[:, None])
        low, high = tl.inline_asm_elementwise(
            NIBBLES_FP16, "=&r,=&r,=&r,=&r,r,r,r", [pair, less], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:  # a nibble in the lowest mantissa bits of 2^23 is the float 2^23 + nibble
        less = (zeros + 8388608.0)[:, None]
        low = (((pair & 15).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - less).to(dtype)
        high = (((pair >> 4).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - less).to(dtype)
    return low, high


@triton.jit
def e4m3(byte, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Converts e4m3 values, read as int8 or uint8 in `byte`, to `dtype`. The bits of a value, shifted to the fields of
    a float32, are the value / 2^120."""
    if ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(E4M3_BF16, "=&r,=&r,r", [byte], tl.bfloat16, is_pure=True, pack=4)
    elif ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(E4M3_FP16, "=&r,=&r,r", [byte], tl.float16, is_pure=True, pack=4)
    else:
        bits = (byte.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # keeps the sign, and bits 20 to 26
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def e2m1(number, dtype: tl.constexpr):
    """Converts e2m1 values in the low 4 bits of `number`, uint8, to `dtype`. The bits of a
    number, shifted to the fields of a float32, are the number / 2^126."""
    bits = ((number & 7).to(tl.int32) << 22) | ((number & 8).to(tl.int32) << 28)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)  # 2^126


@triton.jit
def record_of(scale, zero, outputs, index, out_features, subs, NIBBLES: tl.constexpr, RECORDS: tl.constexpr):
    """(scales, zero points), each [BLOCK_N] float32: those with number `index` of the outputs `outputs` [BLOCK_N]. The
    weight has `out_features` outputs with `subs` scales each."""
    if RECORDS == "plain" or RECORDS == "exponents":
        offset = outputs * subs + index
    elif RECORDS == "by_group" or RECORDS == "by_half":
        offset = index * out_features + outputs
    else:
        offset = (outputs // 8 * subs + index) * 8 + outputs % 8
    if RECORDS == "exponents":
        factor = (tl.load(scale + offset).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        shift = factor
    elif NIBBLES and RECORDS != "plain":
        record = tl.load(scale + offset)
        factor = (record & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        shift = (record >> 16).to(tl.float32)
    else:
        factor = tl.load(scale + offset).to(tl.float32)
        shift = factor
        if NIBBLES:
            shift = tl.load(zero + offset).to(tl.float32)
    return factor, shift


@triton.jit
def _nibbles(data, outputs, first, in_features, pitch, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] nibbles, integers 0…15, of the inputs from `first` on."""
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    pointers = data + outputs.to(tl.int64)[:, None] * pitch + byte[None, :]
    pair = tl.load(pointers, mask=(2 * byte < in_features)[None, :], other=0)
    return tl.interleave(pair & 15, pair >> 4)


@triton.jit
def _half_nibbles(data, outputs, first, pitch):
    """Like _nibbles, for HALF inputs with the layout `by_half`."""
    byte = first // (2 * HALF) * HALF + tl.arange(0, HALF)
    pair = tl.load(data + outputs.to(tl.int64)[:, None] * pitch + byte[None, :])
    return (pair >> (first // HALF % 2 * 4).to(tl.uint8)) & 15


@triton.jit
def transposed_nibbles(data, outputs, first, in_features, pitch, BLOCK_K: tl.constexpr):
    """Like _nibbles, for data in which the 4 × 4 matrix of 32-bit words in each 64 bytes is transposed."""
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    word = byte % 64 // 4
    offset = byte // 64 * 64 + (word % 4 * 4 + word // 4) * 4 + byte % 4
    pointers = data + outputs.to(tl.int64)[:, None] * pitch + offset[None, :]
    pair = tl.load(pointers, mask=(2 * byte < in_features)[None, :], other=0)
    return tl.interleave(pair & 15, pair >> 4)


@triton.jit
def _widen(
    out, data, scale, zero, start, stop, out_features, in_features, subs, sub, pitch,
    NIBBLES: tl.constexpr, RECORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of inputs, block of outputs): dequantises [BLOCK_N, BLOCK_K] weights of the outputs `start` to
    stop - 1 into out [stop - start, in_features]. A block of BLOCK_K inputs lies in one record of `sub` inputs."""
    within = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = tl.minimum(start + within, out_features - 1)
    first = tl.program_id(0) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    factor, shift = record_of(scale, zero, outputs, first // sub, out_features, subs, NIBBLES, RECORDS)
    if NIBBLES:
        if RECORDS == "transposed":
            integers = transposed_nibbles(data, outputs, first, in_features, pitch, BLOCK_K)
        elif RECORDS == "by_half":
            integers = _half_nibbles(data, outputs, first, pitch)
        else:
            integers = _nibbles(data, outputs, first, in_features, pitch, BLOCK_K)
        if RECORDS == "exponents":
            weights = e2m1(integers, tl.float32)
        else:
            weights = integers.to(tl.float32) - shift[:, None]
    else:
        pointers = data + outputs.to(tl.int64)[:, None] * pitch + k[None, :]
        weights = e4m3(tl.load(pointers, mask=(k < in_features)[None, :], other=0), tl.float32, False)
    to = out + within.to(tl.int64)[:, None] * in_features + k[None, :]
    inside = (start + within < stop)[:, None] & (k < in_features)[None, :]
    tl.store(to, (weights * factor[:, None]).to(out.dtype.element_ty), mask=inside)


def widen_outputs(weight: Quantised, start: int, out: Tensor) -> None:
    """Dequantises the outputs of an int4 or fp8 weight from `start` on into `out` [outputs, in_features]."""
    count = len(out)
    in_features = weight.in_features
    depth = block_inputs(weight.sub, in_features, 64)
    zero = weight.scale if weight.zero is None else weight.zero
    _widen[(triton.cdiv(in_features, depth), triton.cdiv(count, BLOCK))](
        out, weight.data, weight.scale, zero, start, start + count, weight.out_features, in_features,
        weight.subs, weight.sub, weight.data.stride(0), weight.format == "int4", weight.records, BLOCK, depth,
        num_warps=4,
    )  # fmt: skip


def block_inputs(sub: int, in_features: int, limit: int) -> int:
    """The number of inputs of a block: the largest power of two that is at most `limit` (a power of two) and divides
    `sub`, so that all inputs of a block have the same scale. `limit` if each output has one scale."""
    return limit if sub >= in_features else math.gcd(sub, limit)
