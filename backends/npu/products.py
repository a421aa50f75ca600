"""Matrix products on the NPU. kernels/ops/linear.py has the references.

A packed weight is [in_features, out_features]: its outputs are columns, as torch_npu's products read them. Weights of
experts have one more dimension in front. fp8 and MXFP4 weights have no product: they stay as they are, for the
references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.ops import linear as reference
from ...kernels.ops.linear import Int4, Int8, Linear, Weight, map_tensors, weight_tensors

DTYPE = torch.bfloat16  # of activations; the references compute other ones
MAX_WIDTH = 65535  # inputs and outputs of a quantised product
MAX_BLOCKS = 64
WORD = 8  # int4 numbers in an int32


class Dense(NamedTuple):
    """A weight of floats."""

    data: Tensor  # [..., in_features, out_features]

    @property
    def out_features(self) -> int:
        return self.data.shape[-1]


class Int8Columns(NamedTuple):
    """data * scale. A weight of more than MAX_WIDTH outputs has equal blocks of them in its first dimension."""

    data: Tensor  # [..., in_features, out_features] int8
    scale: Tensor  # [..., out_features] float32
    blocks: int = 1
    # Of static scales: [..., 2, out_features] bfloat16, 1 / scale and the offset of activations; [..., out_features]
    # float32, the negative of what the offset adds to an output.
    inputs: Tensor | None = None
    shift: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.blocks * self.scale.shape[-1]


class Int4Columns(NamedTuple):
    """(number + offset) * scale, with a number -8…7 for each input and output. Blocks as in Int8Columns."""

    data: Tensor  # [..., in_features, out_features / 8] int32, packed by npu_convert_weight_to_int4pack
    scale: Tensor  # [..., groups, out_features] bfloat16, as the product requires
    offset: Tensor  # as scale
    group: int  # inputs per scale, a multiple of 32; 0: all inputs
    blocks: int = 1

    @property
    def out_features(self) -> int:
        return self.blocks * self.scale.shape[-1]


Columns = Dense | Int8Columns | Int4Columns
Product = Callable[[Tensor, Any, Tensor | None], Tensor]


def dense(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """See linear.dense."""
    if not isinstance(weight, Dense):
        return reference.dense(x, weight, bias, dtype)
    rows = x.flatten(0, -2)  # no view of the weight: it may be FRACTAL_NZ
    product = rows @ weight.data if bias is None else torch.addmm(bias.to(x.dtype), rows, weight.data)
    return _shaped(product, x).to(dtype or x.dtype)


def int8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """See linear_int8.int8. The result is rounded to x's dtype."""
    if not isinstance(weight, Int8Columns):
        return reference.linear_int8.int8(x, weight, bias, dtype)
    return _by_block(_int8, x, weight, bias).to(dtype or x.dtype)


def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """See linear_int4.int4_wide: activations are not rounded. The result is rounded to x's dtype."""
    if not isinstance(weight, Int4Columns):
        return reference.linear_int4.int4(x, weight, bias, dtype)
    return _by_block(_int4, x, weight, bias).to(dtype or x.dtype)


def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """See linear_int4.int4_wide. The result is rounded to x's dtype."""
    if not isinstance(weight, Int4Columns):
        return reference.linear_int4.int4_wide(x, weight, bias, dtype)
    return _by_block(_int4, x, weight, bias).to(dtype or x.dtype)


def _by_block(product: Product, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """The product of x [..., in_features] with each block of outputs. The NPU's products refuse empty tensors."""
    rows = x.flatten(0, -2)
    if not len(rows):
        return x.new_empty(*x.shape[:-1], weight.blocks * weight.scale.shape[-1])
    if weight.blocks == 1:
        return _shaped(product(rows, weight, bias), x)
    blocks = [map_tensors(weight, itemgetter(block)) for block in range(weight.blocks)]
    biases = [None] * weight.blocks if bias is None else bias.chunk(weight.blocks)
    outputs = [product(rows, block, shift) for block, shift in zip(blocks, biases, strict=True)]
    return _shaped(torch.cat(outputs, dim=1), x)


def _shaped(product: Tensor, x: Tensor) -> Tensor:
    """A product [rows, out_features] with the first dimensions of x [..., in_features]."""
    output: Tensor = product.unflatten(0, x.shape[:-1])
    return output


def _int8(x: Tensor, weight: Int8Columns, bias: Tensor | None) -> Tensor:
    """W8A8: x [rows, in_features] -> [rows, out_features]. Each row of x gets a scale, if there is no static one."""
    if weight.inputs is not None and weight.shift is not None:
        factor, offset = weight.inputs[:, :1]
        integers = torch.ops.npu.npu_quantize(x, factor, offset, torch.qint8, -1, False)
        total = weight.shift if bias is None else weight.shift + bias.float()
        static: Tensor = torch.ops.npu.npu_quant_matmul(
            integers, weight.data, weight.scale, bias=total, output_dtype=x.dtype
        )
        return static
    integers, scale = torch.ops.npu.npu_dynamic_quant(x)
    shift = None if bias is None else bias.float()
    output: Tensor = torch.ops.npu.npu_quant_matmul(
        integers, weight.data, weight.scale, pertoken_scale=scale, bias=shift, output_dtype=x.dtype
    )
    return output


def _int4(x: Tensor, weight: Int4Columns, bias: Tensor | None) -> Tensor:
    """W4A16: x [rows, in_features] -> [rows, out_features]."""
    shift = None if bias is None else bias.float()
    output: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
        x, weight.data, weight.scale, antiquant_offset=weight.offset, bias=shift, antiquant_group_size=weight.group
    )
    return output


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """See linear.pack_slices."""
    slices = iter(slices)
    first = next(slices)
    slices = chain([first], slices)
    blocks = _block_count(first, out_features) if dtype == DTYPE else 0
    if not blocks:
        return reference.pack_slices(slices, out_features, dtype)
    columns: Any = stack(slices, blocks, out_features // blocks)
    return map_tensors(columns, itemgetter(0)) if blocks == 1 else columns._replace(blocks=blocks)


def _block_count(weight: Weight, out_features: int) -> int:
    """The number of equal blocks of outputs that the product of the weight's format supports; 0: it supports none."""
    if isinstance(weight, Tensor):
        return 1
    if not isinstance(weight, Int8 | Int4):
        return 0
    unit = WORD if isinstance(weight, Int4) else 1
    counts = range(1, MAX_BLOCKS + 1)
    return next((n for n in counts if out_features % (n * unit) == 0 and out_features // n <= MAX_WIDTH), 0)


def stack(slices: Iterable[Weight], blocks: int, width: int) -> Columns:
    """Tensors [blocks, ...] of a weight of blocks * width outputs, from slices of outputs."""
    stacked: Any = None
    for block, start, piece in _pieces(slices, width):
        outputs = len(weight_tensors(piece)[0])
        columns = _columns(piece)
        if stacked is None:
            stacked = map_tensors(columns, partial(_room, blocks=blocks, share=width / outputs))
        for target, part in zip(weight_tensors(stacked), weight_tensors(columns), strict=True):
            first = start * part.shape[-1] // outputs
            target[block, ..., first : first + part.shape[-1]] = part
    result: Columns = stacked
    return result


def _room(part: Tensor, blocks: int, share: float) -> Tensor:
    """Memory for `blocks` tensors of `share` times the columns of `part`."""
    return part.new_empty(blocks, *part.shape[:-1], round(part.shape[-1] * share))


def _pieces(slices: Iterable[Weight], width: int) -> Iterator[tuple[int, int, Weight]]:
    """The slices, cut at the ends of blocks of `width` outputs: (block, first output in the block, piece)."""
    start = 0
    for part in slices:
        stop = start + len(weight_tensors(part)[0])
        for block in range(start // width, -(-stop // width)):
            first, last = max(start, block * width), min(stop, (block + 1) * width)
            yield block, first - block * width, map_tensors(part, itemgetter(slice(first - start, last - start)))
        start = stop


def _columns(weight: Weight) -> Columns:
    match weight:
        case Int8():
            return _int8_columns(weight)
        case Int4():
            return _int4_columns(weight)
    assert isinstance(weight, Tensor), "other formats stay plain"
    return Dense(weight.to(DTYPE).t())


def _int8_columns(weight: Int8) -> Int8Columns:
    scale = weight.scale.float()
    if weight.inputs is None:
        return Int8Columns(weight.data.t(), scale)
    inputs = torch.stack((1.0 / weight.inputs[:, 0], weight.inputs[:, 1])).to(DTYPE)
    scale = scale / inputs[0].float()  # of the rounded factor, so that its error cancels
    shift = -inputs[1].float() * weight.data.sum(1, dtype=torch.int32) * scale
    return Int8Columns(weight.data.t(), scale, 1, inputs, shift)


def _int4_columns(weight: Int4) -> Int4Columns:
    nibbles = torch.stack((weight.data & 15, weight.data >> 4), dim=-1).flatten(-2)[:, : weight.in_features]
    words = _words(nibbles.t().to(torch.int32).contiguous() - 8)
    offset = 8 - weight.zero.t().to(DTYPE)
    group = weight.group if weight.group < weight.in_features else 0
    return Int4Columns(words, weight.scale.t().to(DTYPE), offset, group)


def _words(numbers: Tensor) -> Tensor:
    """numbers [in_features, out_features] int32, -8…7 -> [in_features, out_features / 8] int32. On the CPU, samples of
    the same size: the first output in the lowest bits."""
    if numbers.device.type == "npu":
        words: Tensor = torch.ops.npu.npu_convert_weight_to_int4pack(numbers)
        return words
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32, device=numbers.device)
    nibbles: Tensor = numbers.unflatten(1, (-1, WORD)) & 15
    return (nibbles << shifts).sum(-1, dtype=torch.int32)


LINEAR = Linear(dense=dense, int8=int8, int4=int4, int4_wide=int4_wide, pack_slices=pack_slices)
