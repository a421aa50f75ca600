"""Products with int8, int4 and fp8 weights.

With few rows, weights of int4 and fp8 become floats in registers and meet tensor cores; with more, in memory, and torch
multiplies them. Sums are of float32. int8 is torch's product of whole numbers, rounded before and scaled after.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import linear_fp8, linear_int4, linear_int8
from ..ops.linear import Fp8, Int4, Int8
from .round_rows import as_rounded, round_rows, scale_back
from .widen import weights_of, widened

WARPS, STAGES = 8, 3
FEW = 16  # rows; with more it is sooner to write the weights as floats and let torch multiply (H200: 2 to 7 times)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
        weights, factor = weights_of(
            data, scale, zero, output, first, outs, ins, subs, sub, pitch, NIBBLES, TURNED, BLOCK_K
        )
        product = tl.dot(held, tl.trans(weights.to(held.dtype)), input_precision="ieee")
        sums += product * factor[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outs + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & there[None, :])


def rows_of_block() -> int:
    return 16 if torch.version.hip is None else 32  # one of AMD's GPUs runs out of registers with 16


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
    if rows > FEW:
        for start, weights in widened(data, scale, zero, outs, ins, sub, x.dtype, turned, nibbles):
            to = slice(start, start + len(weights))
            if bias is None and out.dtype == x.dtype:
                torch.mm(x, weights.t(), out=out[:, to])
            else:
                sums = _sums(x, weights)
                out[:, to] = sums if bias is None else sums + bias[to]
        return out
    block_m = rows_of_block()
    block_k = depth_of_block(sub, ins, nibbles)
    subs = -(-ins // sub)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outs, 64))
    _product[grid](
        out, x, data, scale, zero if zero is not None else scale, bias if bias is not None else scale, rows, outs, ins,
        subs, sub, x.stride(0), data.stride(0), nibbles, turned, bias is not None, block_m, 64, block_k,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def _sums(x: Tensor, weights: Tensor) -> Tensor:
    """x times the weights' transpose, float32: rounded to 16 bits, many of a head's logits would be equal."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weights.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weights.t().float())


def int8(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W8A8 by torch's product of int8, for the shapes that it takes."""
    outs, ins = weight.data.shape
    flat = x.reshape(-1, ins)
    if not x.is_cuda or len(flat) <= FEW or ins % 16 or outs % 8 or ins == 0:
        return linear_int8.int8(x, weight, bias, dtype)
    whole, scale = round_rows(flat if flat.stride(-1) == 1 else flat.contiguous())
    sums = torch._int_mm(whole, weight.data.t())
    return scale_back(sums, scale, weight.scale, bias, dtype or x.dtype).view(*x.shape[:-1], outs)


def int4(x: Tensor, weight: Int4, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W4A8: x becomes what its rounded groups stand for, and keeps its type."""
    if x.dtype not in _FLOATS:
        return linear_int4.int4(x, weight, bias, dtype)
    return int4_wide(rounded(x, weight.group), weight, bias, dtype)


def rounded(x: Tensor, group: int) -> Tensor:
    """Each group of inputs of x rounded to int8 (linear_int8.rounded), in x's type."""
    if group & (group - 1) == 0 and group <= 1024 and x.stride(-1) == 1:
        return as_rounded(x.reshape(-1, x.shape[-1]), group).view(x.shape)
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
