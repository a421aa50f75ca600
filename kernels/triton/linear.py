"""Products with int8, int4 and fp8 weights.

tiled.py computes products of up to 128 rows with most int4 weights, and of 17 to 128 rows with most fp8 weights;
small_batch.py computes the other products of up to 16 rows. For more rows:
- int4 and fp8 weights are dequantised into memory, and torch multiplies them with float32 sums;
- for int8, activations are rounded to int8, torch multiplies the integers, and the result is scaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu.widened_product import widened_product
from ..ops import linear as reference
from ..ops import linear_fp8, linear_int4, linear_int8, linear_mxfp4
from ..ops.linear import Fp8, Int4, Int8, Mxfp4, Weight
from . import tiled
from .round_rows import as_rounded, round_rows, scale_back
from .small_batch import MAX_IN_FEATURES, MAX_ROWS, small_batch
from .small_batch_transposed import small_batch_transposed
from .target import FLOATS, device_properties, supports
from .widen import Quantised as Quantised
from .widen import Records, widen_outputs


class Packed(NamedTuple):
    """An int4 weight [out_features, in_features] with transposed scales and zero points, so that programs read those of
    neighbouring outputs contiguously."""

    data: Tensor  # [out_features, ceil(in_features / 2)] uint8, as in Int4
    records: Tensor  # [groups, out_features] int32: float16 scale in the low 16 bits, zero point in the high 16 bits
    group: int
    in_features: int
    is_by_half: bool  # the nibbles are in the order of tiled.by_half


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype, of_experts: bool = False) -> Any:
    """The weight as `Packed` if it is int4, and as Fp8 if it is MXFP4; weights of other formats stay plain.

    `of_experts`: moe.py multiplies the weight.
    """
    slices = iter(slices)
    first = next(slices)
    if isinstance(first, Mxfp4):
        return reference.pack_slices(linear_mxfp4.as_fp8(chain([first], slices)), out_features, dtype)
    if not isinstance(first, Int4):
        return reference.pack_slices(chain([first], slices), out_features, dtype)
    groups = first.scale.shape[1]
    is_divisible = tiled.is_divisible(first.in_features, first.group, tiled.SIZE)
    is_by_half = is_divisible and dtype.itemsize == 2 and not of_experts
    data = first.data.new_empty(out_features, first.data.shape[1])
    records = first.data.new_empty(groups, out_features, dtype=torch.int32)
    start = 0
    for weight in chain([first], slices):
        assert isinstance(weight, Int4)
        stop = start + len(weight.data)
        data[start:stop] = tiled.by_half(weight.data) if is_by_half else weight.data
        pairs = (weight.scale.half().view(torch.int16).int() & 0xFFFF) | (weight.zero.int() << 16)
        records[:, start:stop] = pairs.t()
        start = stop
    return Packed(data, records, first.group, first.in_features, is_by_half)


def product(x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """x [rows, in_features] times an int4 or fp8 weight -> [rows, out_features] in `dtype`, by default x's."""
    rows = len(x)
    dtype = dtype or x.dtype
    if rows == 0 or weight.out_features == 0:
        return x.new_empty(rows, weight.out_features, dtype=dtype)
    if tiled.is_supported(x, weight):
        return tiled.tiled_product(x, weight, bias, dtype)
    if rows > MAX_ROWS or weight.records == "by_half":
        return widened_product(x, weight.out_features, partial(widen_outputs, weight), _sums, bias, dtype)
    if weight.records == "transposed":
        return small_batch_transposed(x, weight, bias, dtype)
    return small_batch(x, weight, bias, dtype)


def _sums(x: Tensor, weights: Tensor) -> Tensor:
    """x @ weightsᵀ in float32, because many logits would be equal after rounding to 16 bits."""
    if x.dtype != torch.float32 and device_properties(x.device).target.float_sums:
        return torch.mm(x, weights.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weights.t().float())


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The product with a plain weight. Float32 outputs (logits) of 16-bit inputs are sums that were not rounded."""
    narrow = weight.dtype == x.dtype != torch.float32 and supports(x)
    if dtype != torch.float32 or not narrow or x.numel() == 0 or not device_properties(x.device).target.float_sums:
        return reference.dense(x, weight, bias, dtype)
    sums = _sums(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        sums += bias
    return sums.view(*x.shape[:-1], len(weight))


def int8(x: Tensor, weight: Int8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W8A8. For more than 16 rows torch multiplies the integers, if it supports the shape."""
    out_features, in_features = weight.data.shape
    rows = x.numel() // max(in_features, 1)
    if rows > MAX_ROWS:
        supported = device_properties(x.device).target.integer_sums and in_features % 16 == out_features % 8 == 0
    else:
        supported = rows > 0 and x.dtype in FLOATS and 0 < in_features <= MAX_IN_FEATURES and out_features > 0
    if not supported:
        return linear_int8.int8(x, weight, bias, dtype)
    dtype = dtype or x.dtype
    flat = x.reshape(-1, in_features)
    integers, scale = round_rows(flat if flat.stride(-1) == 1 else flat.contiguous())
    if rows > MAX_ROWS:
        out = scale_back(torch._int_mm(integers, weight.data.t()), scale, weight.scale, bias, dtype)
    else:
        quantised = Quantised("int8", weight.data, weight.scale, None, out_features, in_features, in_features)
        out = small_batch(integers, quantised, bias, dtype, scale)
    return out.view(*x.shape[:-1], out_features)


def int4(x: Tensor, weight: Int4 | Packed, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """W4A8: the groups of x are rounded to int8 and scaled back to x's dtype."""
    if x.dtype not in FLOATS:
        return linear_int4.int4(x, plain(weight), bias, dtype)
    return int4_wide(rounded(x, weight.group), weight, bias, dtype)


def rounded(x: Tensor, group: int) -> Tensor:
    """x with each group of inputs rounded to int8 (linear_int8.rounded) and scaled back to x's dtype."""
    if group & (group - 1) == 0 and group <= 1024 and x.stride(-1) == 1:
        return as_rounded(x.reshape(-1, x.shape[-1]), group).view(x.shape)
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    integers, scale = linear_int8.rounded(padded)
    return (integers * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def int4_wide(x: Tensor, weight: Int4 | Packed, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype not in FLOATS:
        return linear_int4.int4_wide(x, plain(weight), bias, dtype)
    quantised = _quantised_int4(weight)
    out = product(x.reshape(-1, weight.in_features), quantised, bias, dtype)
    return out.view(*x.shape[:-1], quantised.out_features)


def _quantised_int4(weight: Int4 | Packed) -> Quantised:
    sizes = len(weight.data), weight.in_features, weight.group
    if isinstance(weight, Packed):
        records: Records = "by_half" if weight.is_by_half else "by_group"
        return Quantised("int4", weight.data, weight.records, None, *sizes, records)
    return Quantised("int4", weight.data, weight.scale, weight.zero, *sizes)


def plain(weight: Int4 | Packed) -> Int4:
    """The weight as it was before packing."""
    if isinstance(weight, Int4):
        return weight
    records = weight.records.t().contiguous()
    scale = (records & 0xFFFF).to(torch.int16).view(torch.float16)
    data = tiled.in_order(weight.data) if weight.is_by_half else weight.data
    return Int4(data, scale, (records >> 16).to(torch.uint8), weight.group, weight.in_features)


def fp8(x: Tensor, weight: Fp8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    out_features, in_features = weight.data.shape
    one_record = weight.group >= in_features
    if x.dtype not in FLOATS or not (one_record or weight.group % 32 == 0):
        return linear_fp8.fp8(x, weight, bias, dtype)
    data = weight.data.view(torch.uint8)
    quantised = Quantised("fp8", data, weight.scale, None, out_features, in_features, weight.group)
    out = product(x.reshape(-1, in_features), quantised, bias, dtype)
    return out.view(*x.shape[:-1], out_features)


def mxfp4(x: Tensor, weight: Mxfp4 | Fp8, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The product with a weight that `pack_slices` converted, or with a plain weight."""
    if isinstance(weight, Mxfp4):
        return linear_mxfp4.mxfp4(x, weight, bias, dtype)
    return fp8(x, weight, bias, dtype)
