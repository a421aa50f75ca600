"""Products with packed weights of every format (linear*.cpp); kernels/ops/linear.py defines them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import linear as reference
from ...ops.linear import Fp8, Int4, Int8, Mxfp4, Weight, weight_tensors

_linear = torch.ops.localllm.linear.default
_pack = torch.ops.localllm.pack.default
_packed_bytes = torch.ops.localllm.packed_bytes.default
_first_touch = torch.ops.localllm.first_touch.default

# Values of the enumeration Format in layout.h.
_PLAIN = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8 = 3
_INT4 = 4
_FP8 = 5
_MXFP4 = 6

_HUGE_PAGE = 2 << 20  # bytes


class Packed(NamedTuple):
    """A weight [out_features, in_features] in the layout of layout.h. Its bytes are the same on every CPU."""

    data: Tensor  # uint8
    format: int
    out_features: int
    in_features: int
    group: int  # number of inputs that share a scale; in_features if an output has one scale or none

    def place(self) -> None:
        """Call before the first write to `data`: each thread touches the share that it will read in products, so the
        system allocates that share on the thread's NUMA node."""
        _first_touch(self.data, _packed_bytes(self.format, 1, self.in_features, self.group))


class _Layout(NamedTuple):
    """The fields of Packed that do not depend on the number of outputs."""

    format: int
    in_features: int
    group: int

    def packed_bytes(self, out_features: int) -> int:
        size: int = _packed_bytes(self.format, out_features, self.in_features, self.group)
        return size


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """The weight as `Packed`; it keeps its dtype, and activations may have any float dtype. The reference packs formats
    that no kernel supports."""
    slices = iter(slices)
    first = next(slices)
    layout = layout_of(first)
    if layout is None:
        return reference.pack_slices(chain([first], slices), out_features, dtype)
    data = _allocate(layout.packed_bytes(out_features))
    packed = Packed(data, layout.format, out_features, layout.in_features, layout.group)
    packed.place()
    end = 0
    for weight in chain([first], slices):
        start = end
        end = start + layout.packed_bytes(len(weight_tensors(weight)[0]))
        _fill(data[start:end], weight, layout)
    return packed


def _allocate(size: int) -> Tensor:
    """[size] uint8 aligned to a huge page. Unaligned weights lie partly in small pages, which are slower to read.

    Weights smaller than a huge page use plain memory, so scripts/sanitize can check their bounds.
    """
    if size < _HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -memory.data_ptr() % _HUGE_PAGE
    return memory[begin : begin + size]


def dense(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.dense, x, weight, bias, dtype)


def int8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.linear_int8.int8, x, weight, bias, dtype)


def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.linear_int4.int4, x, weight, bias, dtype)


def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.linear_int4.int4_wide, x, weight, bias, dtype, wide=True)


def fp8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.linear_fp8.fp8, x, weight, bias, dtype)


def mxfp4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(reference.linear_mxfp4.mxfp4, x, weight, bias, dtype)


def layout_of(weight: Weight) -> _Layout | None:
    """The layout of a weight; None if no kernel supports the weight."""
    match weight:
        case Int8():
            return _Layout(_INT8, weight.data.shape[1], weight.data.shape[1])
        case Int4():
            return _Layout(_INT4, weight.in_features, weight.group)
        case Fp8():
            return _Layout(_FP8, weight.data.shape[1], weight.group)
        case Mxfp4():
            return _Layout(_MXFP4, 2 * weight.data.shape[1], reference.linear_mxfp4.GROUP)
        case Tensor() if weight.dtype in _PLAIN:
            return _Layout(_PLAIN[weight.dtype], weight.shape[1], weight.shape[1])
    return None


def _fill(packed: Tensor, weight: Weight, layout: _Layout) -> None:
    """Write the panels (PANEL outputs each) of one slice. Only the last panel of a weight may be partly filled."""
    data, *scales = (tensor.contiguous() for tensor in weight_tensors(weight))
    _pack(packed, data, *scales, *[None] * (2 - len(scales)), layout.format, layout.group)


def _product(
    fallback: Callable[..., Tensor],
    x: Tensor,
    weight: Any,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    wide: bool = False,
) -> Tensor:
    """The product with a packed weight; `fallback` computes products with weights that are not `Packed`."""
    if not isinstance(weight, Packed):
        return fallback(x, weight, bias, dtype)
    rows = x if x.dim() == 2 else x.reshape(-1, weight.in_features)
    out = x.new_empty(rows.shape[0], weight.out_features, dtype=dtype or x.dtype)
    shift = None if bias is None else bias.float()
    _linear(out, rows, weight.data, shift, weight.format, weight.in_features, weight.group, wide)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features)
