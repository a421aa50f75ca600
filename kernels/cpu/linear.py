"""Products with packed weights of every format (linear*.cpp); kernels/ops/linear.py defines them."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import linear as reference
from ..ops.linear import Fp8, Int4, Int8, Weight, weight_tensors

_linear = torch.ops.localllm.linear.default
_pack = torch.ops.localllm.pack.default
_packed_bytes = torch.ops.localllm.packed_bytes.default
_first_touch = torch.ops.localllm.first_touch.default

# Values of the enumeration Format in layout.h.
_PLAIN = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INT8 = 3
_INT4 = 4
_FP8 = 5

_HUGE_PAGE = 2 << 20  # bytes


class Packed(NamedTuple):
    """A weight [out_features, in_features] in the layout of layout.h. Its bytes are the same on every CPU."""

    data: Tensor  # uint8
    format: int
    out_features: int
    in_features: int
    group: int  # inputs that share a scale; in_features if an output has one scale or none

    def place(self) -> None:
        """Call before the first write to `data`: each thread touches the part that it will read in products, so the
        system allocates that part on the thread's NUMA node."""
        _first_touch(self.data, _packed_bytes(self.format, 1, self.in_features, self.group))


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """The weight as Packed, in its own dtype; activations may have any float dtype. The reference packs formats that no
    kernel supports."""
    slices = iter(slices)
    first = next(slices)
    layout = _layout(first)
    if layout is None:
        return reference.pack_slices(chain([first], slices), out_features, dtype)
    packed = Packed(
        _untouched(_packed_bytes(layout[0], out_features, *layout[1:])), layout[0], out_features, *layout[1:]
    )
    packed.place()
    end = 0
    for part in chain([first], slices):
        start = end
        end = end + _packed_bytes(layout[0], len(weight_tensors(part)[0]), *layout[1:])
        _fill(packed.data[start:end], part, layout)
    return packed


def _untouched(size: int) -> Tensor:
    """[size] uint8 aligned to a huge page, because unaligned weights lie partly in small pages, which are slower to
    read. Tensors smaller than a huge page use plain memory, so scripts/sanitize can check their bounds."""
    if size < _HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8)
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -room.data_ptr() % _HUGE_PAGE
    return room[begin : begin + size]


def dense(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return _product(x, weight, bias, dtype) if isinstance(weight, Packed) else reference.dense(x, weight, bias, dtype)


def int8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(weight, Packed):
        return _product(x, weight, bias, dtype)
    return reference.linear_int8.int8(x, weight, bias, dtype)


def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(weight, Packed):
        return _product(x, weight, bias, dtype)
    return reference.linear_int4.int4(x, weight, bias, dtype)


def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(weight, Packed):
        return _product(x, weight, bias, dtype, wide=True)
    return reference.linear_int4.int4_wide(x, weight, bias, dtype)


def fp8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(weight, Packed):
        return _product(x, weight, bias, dtype)
    return reference.linear_fp8.fp8(x, weight, bias, dtype)


def _layout(weight: Weight) -> tuple[int, int, int] | None:
    """(format, in_features, group), format as in layout.h; None if no kernel supports the weight."""
    match weight:
        case Int8():
            return _INT8, weight.data.shape[1], weight.data.shape[1]
        case Int4():
            return _INT4, weight.in_features, weight.group
        case Fp8():
            return _FP8, weight.data.shape[1], weight.group
        case Tensor() if weight.dtype in _PLAIN:
            return _PLAIN[weight.dtype], weight.shape[1], weight.shape[1]
    return None


def _fill(packed: Tensor, weight: Weight, layout: tuple[int, int, int]) -> None:
    """Write the panels of one slice. Only the last slice of a weight may end in a partly filled panel."""
    data, *scales = (part.contiguous() for part in weight_tensors(weight))
    _pack(packed, data, *scales, *[None] * (2 - len(scales)), layout[0], layout[2])


def _product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype | None, wide: bool = False) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, weight.in_features)
    out = x.new_empty(rows.shape[0], weight.out_features, dtype=dtype or x.dtype)
    shift = None if bias is None else bias.float()
    _linear(out, rows, weight.data, shift, weight.format, weight.in_features, weight.group, wide)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features)
