"""Products with int4 and fp8 weights for many rows: weights become floats in registers and meet tensor cores.

Sums are of float32. `turned` int4 weights and records are those of kernels/cuda/linear.py, others those of kernels/ops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import linear_fp8, linear_int4, linear_int8
from ..ops.linear import Fp8, Int4, Int8

WARPS, STAGES = 8, 3
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
def _product(
    out,
    x,
    data,
    scale,
    zero,
    bias,
    rows,
    outs,
    ins,
    subs,
    sub,
    x_stride,
    pitch,
    NIBBLES: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_K inputs are all of one record, of `sub` inputs."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = output < outs
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, ins, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (row < rows)[:, None] & (k < ins)[None, :]
        held = tl.load(x + row.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
        part = first // sub
        if TURNED:
            place = (output // 8 * subs + part) * 8 + output % 8
        else:
            place = output * subs + part
        if NIBBLES:
            whole = _nibbles(data, output, first, ins, pitch, TURNED, BLOCK_K, outs).to(tl.float32)
            if TURNED:
                record = tl.load(scale + place, mask=there, other=0)
                factor = (record & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                weights = whole - (record >> 16).to(tl.float32)[:, None]
            else:
                factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
                weights = whole - tl.load(zero + place, mask=there, other=0).to(tl.float32)[:, None]
        else:
            factor = tl.load(scale + place, mask=there, other=0.0)
            weights = _e4m3(data, output, first, ins, pitch, BLOCK_K, outs)
        product = tl.dot(held, tl.trans(weights.to(held.dtype)), input_precision="ieee")
        sums += product * factor[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def rows_of_block(rows: int) -> int:
    if rows <= 16 and torch.version.hip is None:  # one of AMD's GPUs runs out of registers with 16
        return 16
    return 32 if rows <= 32 else 64


def depth_of_block(sub: int, ins: int, nibbles: bool) -> int:
    """Inputs, all of one record; registers hold what their weights become, and AMD's hold less of it."""
    deep = nibbles and torch.version.hip is None and (sub >= ins or sub % 64 == 0)
    return 64 if deep else 32


def product(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    outs: int,
    sub: int,
    turned: bool = False,
    nibbles: bool = False,
) -> Tensor:
    """x [rows, ins] times the weight, a record of scale (and zero) for every `sub` inputs: 32, 64, or a multiple of
    128, or all of them."""
    rows, ins = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(rows, outs, dtype=dtype or x.dtype)
    if out.numel() == 0:
        return out
    block_m = rows_of_block(rows)
    block_k = depth_of_block(sub, ins, nibbles)
    subs = -(-ins // sub)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outs, 64))
    _product[grid](
        out, x, data, scale, zero if zero is not None else scale, bias if bias is not None else scale, rows, outs, ins,
        subs, sub, x.stride(0), data.stride(0), nibbles, turned, bias is not None, block_m, 64, block_k,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def int8(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W8A8 by torch's product of int8, for the shapes that it takes."""
    outs, ins = weight.data.shape
    flat = x.reshape(-1, ins)
    if not x.is_cuda or len(flat) <= 16 or ins % 16 or outs % 8 or ins == 0:
        return linear_int8.int8(x, weight, bias, dtype)
    whole, scale = linear_int8.rounded(flat)
    broken = ~scale.isfinite()  # a NaN has no int8; its scale makes all of the row NaN
    sums = torch._int_mm(whole.masked_fill(broken, 0.0).to(torch.int8), weight.data.t())
    out = sums.float() * (scale * weight.scale.float())
    out = out if bias is None else out + bias.float()
    return out.to(dtype or x.dtype).view(*x.shape[:-1], outs)


def int4(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W4A8: x becomes what its rounded groups stand for, and keeps its type."""
    if x.dtype not in _FLOATS:
        return linear_int4.int4(x, weight, bias, dtype)
    return int4_wide(as_rounded(x, weight.group), weight, bias, dtype)


def as_rounded(x: Tensor, group: int) -> Tensor:
    """Each group of inputs of x rounded to int8 (linear_int8.rounded), in x's type."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    whole, scale = linear_int8.rounded(padded)
    return (whole * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def int4_wide(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype not in _FLOATS:
        return linear_int4.int4_wide(x, weight, bias, dtype)
    outs = len(weight.data)
    flat = x.reshape(-1, weight.ins)
    out = product(
        flat, weight.data, weight.scale, weight.zero, bias, dtype or x.dtype, outs, weight.group, nibbles=True
    )
    return out.view(*x.shape[:-1], outs)


def fp8(x: Tensor, weight: Fp8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    outs, ins = weight.data.shape
    if x.dtype not in _FLOATS or (weight.group < ins and weight.group % 32):
        return linear_fp8.fp8(x, weight, bias, dtype)
    flat = x.reshape(-1, ins)
    out = product(flat, weight.data.view(torch.uint8), weight.scale, None, bias, dtype or x.dtype, outs, weight.group)
    return out.view(*x.shape[:-1], outs)
