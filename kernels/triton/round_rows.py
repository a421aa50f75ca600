"""Rounds activations to int8, and scales integer products back; kernels/ops/linear_int8.py defines both.

The kernels that round add and subtract a large constant. They are compiled with enable_fp_fusion=False, so the compiler
does not fuse a multiplication into the addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _integers(values, largest):
    """values * (127 / largest) rounded to integers, in float32; zeros stay zeros."""
    limit = tl.where(largest == 0.0, 1.0, largest)
    factor = tl.div_rn(tl.full(limit.shape, 127.0, tl.float32), limit)
    integers = (values * factor + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to an integer, ties to even
    return tl.where(largest == 0.0, 0.0, integers)


@triton.jit
def _scale(largest):
    """largest / 127, rounded as in the reference; a plain division is approximate on a GPU."""
    return tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))


@triton.jit
def _round_rows(out, scales, x, in_features, x_stride, BLOCK: tl.constexpr):
    """Program `row`: a row of x as int8, and its scale, which is NaN if a value is NaN or infinite."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, in_features, BLOCK):
        values = tl.load(x + row * x_stride + first + index, mask=first + index < in_features, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        broken |= tl.where(tl.abs(values) < float("inf"), 0, 1)
    top = tl.max(largest, 0)
    wrong = tl.max(broken, 0) > 0
    tl.store(scales + row, tl.where(wrong, float("nan"), tl.max(_scale(largest), 0)))
    top = tl.where(wrong, 0.0, top)
    for first in range(0, in_features, BLOCK):
        inside = first + index < in_features
        values = tl.load(x + row * x_stride + first + index, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * in_features + first + index, _integers(values, top).to(tl.int8), mask=inside)


@triton.jit
def _round_groups(out, x, rows, in_features, x_stride, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Program (rows, group): the values of a group in ROWS rows, rounded to int8 and scaled back to x's dtype."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    index = tl.arange(0, GROUP)[None, :]
    k = tl.program_id(1) * GROUP + index
    inside = (row < rows) & (k < in_features)
    values = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)[:, None]
    wrong = tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), 1)[:, None] > 0
    largest = tl.where(wrong, 0.0, largest)
    rounded = tl.where(wrong, float("nan"), _integers(values, largest) * _scale(largest))
    tl.store(out + row * in_features + k, rounded.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scale_back(out, sums, row_scale, scale, bias, out_features, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block): out = sums * (row_scale * scale) + bias for BLOCK outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = output < out_features
    factor = tl.load(row_scale + row) * tl.load(scale + output, mask=there, other=0.0).to(tl.float32)
    result = tl.load(sums + row * out_features + output, mask=there, other=0).to(tl.float32) * factor
    if HAS_BIAS:
        result += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + output, result.to(out.dtype.element_ty), mask=there)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in_features], its last dimension dense -> ([rows, in_features] int8, [rows] float32 scales)."""
    out = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    if out.numel():
        _round_rows[(len(x),)](out, scales, x, x.shape[1], x.stride(0), BLOCK=2048, num_warps=8, enable_fp_fusion=False)
    return out, scales


def as_rounded(x: Tensor, group: int) -> Tensor:
    """x [rows, in_features] with each group of inputs rounded to int8 and scaled back. `group` is a power of two."""
    out = x.new_empty(x.shape)
    if out.numel():
        rows = max(1, 2048 // group)  # rows of a program
        grid = (triton.cdiv(len(x), rows), triton.cdiv(x.shape[1], group))
        _round_groups[grid](
            out, x, len(x), x.shape[1], x.stride(0), GROUP=group, ROWS=rows, num_warps=4, enable_fp_fusion=False
        )
    return out


def scale_back(sums: Tensor, row_scale: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Integer sums [rows, out_features] int32, dense -> [rows, out_features] in `dtype`, scaled, plus the bias."""
    rows, out_features = sums.shape
    out = sums.new_empty(sums.shape, dtype=dtype)
    if out.numel():
        grid = (rows, triton.cdiv(out_features, 2048))
        with_bias = bias if bias is not None else scale
        _scale_back[grid](
            out, sums, row_scale, scale, with_bias, out_features, bias is not None, BLOCK=2048, num_warps=8
        )
    return out
