"""Linear layers on CUDA devices. kernels/ops/linear.py has the reference.

CUDA C++ (small_batch.cuh) multiplies up to 16 rows of bfloat16 if the GPU has enough shared memory. torch (plain
weights) or Triton (int8, int4, fp8) multiply other inputs; the reference covers the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import linear as reference
from ..ops.linear import Fp8, Int4, Int8, Weight

TRITON = find_spec("triton") is not None

SMALL_BATCH = 16  # limit of the rows of small_batch
BF16, INT8, INT4, INT4_WIDE, FP8 = range(5)  # as Weights in linear.h
_small_batch_op = torch.ops.localllm.small_batch.default
_small_batch_fits = torch.ops.localllm.small_batch_fits.default
torch.library.register_fake("localllm::small_batch", lambda *_: None, allow_override=True)


class Packed(NamedTuple):
    """A weight [out_features, in_features] in the layout of formats.cuh. No pending kernel may write it."""

    data: Tensor  # [out_features, bytes per output] uint8; bf16: [out_features, in_features]
    scale: Tensor | None  # [out_features] float32, for int8 and for fp8 without groups
    # [ceil(out_features / 8), subs, 8] int32. fp8: the bits of a float32 scale. int4: a float16 scale in the low half,
    # the zero point in the high half.
    records: Tensor | None
    format: int
    out_features: int
    in_features: int
    group: int  # inputs per scale; in_features if there is one scale per output or none

    def plain(self) -> Any:
        """The Weight before packing."""
        if self.format == BF16:
            return self.data
        if self.format == INT8:
            assert self.scale is not None
            return Int8(self.data[:, : self.in_features].view(torch.int8), self.scale)
        if self.format == FP8:
            scale = (
                by_output(self.records, self.out_features).view(torch.float32)
                if self.scale is None
                else self.scale[:, None]
            )
            return Fp8(self.data[:, : self.in_features].view(torch.float8_e4m3fn), scale, self.group)
        each = max(1, min(self.group, self.in_features) // sub_of(self.group, self.in_features))  # records per group
        records = by_output(self.records, self.out_features)[:, ::each][:, : -(-self.in_features // self.group)]
        scale = (records & 0xFFFF).to(torch.int16).view(torch.float16)
        nibbles = transpose_words(self.data)[:, : -(-self.in_features // 2)]
        return Int4(nibbles, scale, (records >> 16).to(torch.uint8), self.group, self.in_features)


def sub_of(group: int, in_features: int) -> int:
    """Inputs per int4 record: 128 (a chunk), 64 or 32."""
    return 128 if group % 128 == 0 or group >= in_features else 64 if group % 64 == 0 else 32


def by_output(records: Tensor | None, out_features: int) -> Tensor:
    """[blocks, subs, 8] -> [out_features, subs]"""
    assert records is not None
    return records.transpose(1, 2).flatten(0, 1)[:out_features].contiguous()


def by_block(values: Tensor) -> Tensor:
    """[out_features, subs] of 4 bytes -> [ceil(out_features / 8), subs, 8] int32, padded with zeros."""
    values = torch.nn.functional.pad(values.contiguous().view(torch.int32), (0, 0, 0, -len(values) % 8))
    blocks: Tensor = values.unflatten(0, (-1, 8))
    return blocks.transpose(1, 2).contiguous()


def transpose_words(nibbles: Tensor) -> Tensor:
    """Transposes the 16 words of every 64 bytes as a 4 x 4 matrix; [out_features, bytes]. Is its own inverse."""
    return nibbles.view(len(nibbles), -1, 4, 4, 4).transpose(2, 3).reshape(len(nibbles), -1)


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """Returns a Packed weight, or the plain weight if activations are not bfloat16 or no kernel covers the shape."""
    slices = iter(slices)
    first = next(slices)
    if dtype != torch.bfloat16 or not _covered(first):
        return reference.pack_slices(chain([first], slices), out_features, dtype)
    merged: Packed | None = None
    start = 0
    for part in chain([first], slices):
        packed = _packed(part)
        if merged is None:
            scale = None if packed.scale is None else packed.scale.new_empty(out_features)
            records = (
                None
                if packed.records is None
                else packed.records.new_empty(-(-out_features // 8), *packed.records.shape[1:])
            )
            merged = Packed(
                packed.data.new_empty(out_features, packed.data.shape[1]),
                scale,
                records,
                packed.format,
                out_features,
                *packed[5:],
            )
        stop = start + packed.out_features
        for to, tensor, unit in zip(merged[:3], packed[:3], (1, 1, 8), strict=True):
            if to is not None and tensor is not None:
                to[start // unit : -(-stop // unit)] = tensor
        start = stop
    assert merged is not None
    if merged.data.is_cuda:  # kernels prefetch weights before earlier kernels have ended
        torch.cuda.current_stream(merged.data.device).synchronize()
    return merged


def _covered(weight: Weight) -> bool:
    match weight:
        case Int8() | Int4():
            return True
        case Fp8():
            return weight.group >= weight.data.shape[1] or weight.group % 64 == 0
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def _packed(weight: Weight) -> Packed:
    """Packs some outputs of a covered weight; pads their bytes to the size of a load."""
    pad = torch.nn.functional.pad
    match weight:
        case Int8(data, scale):
            out_features, in_features = data.shape
            return Packed(
                pad(data.view(torch.uint8), (0, -in_features % 16)),
                scale.float(),
                None,
                INT8,
                out_features,
                in_features,
                in_features,
            )
        case Fp8(data, scale, group):
            out_features, in_features = data.shape
            data = pad(data.view(torch.uint8), (0, -in_features % 16))
            if group >= in_features:
                return Packed(data, scale[:, 0].float(), None, FP8, out_features, in_features, in_features)
            return Packed(data, None, by_block(scale.float()), FP8, out_features, in_features, group)
        case Int4(data, scale, zero, group, in_features):
            sub = sub_of(group, in_features)
            each = -(-min(group, in_features) // sub) if group >= in_features else group // sub
            records = (scale.half().view(torch.int16).int() & 0xFFFF) | (zero.int() << 16)
            records = records.repeat_interleave(each, 1)[:, : -(-in_features // sub)]
            data = transpose_words(pad(data, (0, -data.shape[1] % 64)))
            return Packed(data, None, by_block(records), INT4, len(data), in_features, group)
    return Packed(weight, None, None, BF16, weight.shape[0], weight.shape[1], weight.shape[1])


def dense(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_small_batch(x, weight) and _beats_torch(x.numel() // weight.in_features, weight, dtype):
        return _small_batch_product(x, weight, bias, dtype)
    plain = weight.data if isinstance(weight, Packed) else weight
    if dtype == torch.float32 and x.is_cuda and x.dtype == plain.dtype == torch.bfloat16:
        return _unrounded(x, plain, bias)
    return reference.dense(x, plain, bias, dtype)


def _unrounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float32. torch's linear would round it to bfloat16, and the conversion would be another pass."""
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


def int8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    plain = weight.plain() if isinstance(weight, Packed) else weight
    return (_triton().int8 if TRITON else reference.linear_int8.int8)(x, plain, bias, dtype)


def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    if TRITON and isinstance(weight, Packed):
        return _nibbles(_triton().rounded(x, weight.group), weight, bias, dtype or x.dtype)
    plain = weight.plain() if isinstance(weight, Packed) else weight
    return (_triton().int4 if TRITON else reference.linear_int4.int4)(x, plain, bias, dtype)


def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_small_batch(x, weight, INT4_WIDE):
        return _small_batch_product(x, weight, bias, dtype, INT4_WIDE)
    if TRITON and isinstance(weight, Packed):
        return _nibbles(x, weight, bias, dtype or x.dtype)
    plain = weight.plain() if isinstance(weight, Packed) else weight
    return (_triton().int4_wide if TRITON else reference.linear_int4.int4_wide)(x, plain, bias, dtype)


def fp8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    plain = weight.plain() if isinstance(weight, Packed) else weight
    return (_triton().fp8 if TRITON else reference.linear_fp8.fp8)(x, plain, bias, dtype)


def _triton() -> Any:
    from ..triton import linear

    return linear


def _nibbles(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    flat = x.reshape(-1, weight.in_features)
    records = (
        weight.data,
        weight.records,
        None,
        bias,
        dtype,
        weight.out_features,
        sub_of(weight.group, weight.in_features),
    )
    out: Tensor = _triton().product(flat, *records, transposed=True, nibbles=True)
    return out.view(*x.shape[:-1], weight.out_features)


def _is_small_batch(x: Tensor, weight: Any, format: int | None = None) -> bool:
    if not isinstance(weight, Packed) or not x.is_cuda or x.dtype != torch.bfloat16 or weight.in_features % 8:
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    whole = x.data_ptr() % 16 == 0 and (rows == 1 or x.stride(-2) % 8 == 0) and x.stride(-1) == 1
    return 0 < rows <= SMALL_BATCH and whole and fits(weight, rows, format)


def fits(weight: Packed, rows: int, format: int | None = None, gated: bool = False, normed: bool = False) -> bool:
    """True if the GPU has enough shared memory for small_batch with this weight and 1 to 16 rows
    (small_batch_plan.h)."""
    data = weight.data
    sizes = weight.out_features, weight.in_features, data.stride(0) * data.element_size()
    return _fits(data.device, rows, *sizes, weight.format if format is None else format, weight.group, gated, normed)


@cache
def _fits(
    device: torch.device, rows: int, out_features: int, in_features: int, row_bytes: int, format: int, group: int,
    gated: bool, normed: bool,
) -> bool:  # fmt: skip
    return bool(
        _small_batch_fits(device.index or 0, rows, out_features, in_features, row_bytes, format, group, gated, normed)
    )


def _beats_torch(rows: int, weight: Packed, dtype: torch.dtype | None) -> bool:
    """True if small_batch is faster than torch for bf16 weights; tuned on H200 with scripts/bench/cuda_linear.py. For
    float32 outputs (logits) torch needs an additional conversion."""
    if dtype == torch.float32:
        return rows <= 8
    if weight.out_features <= 4096 and weight.in_features >= 2048:
        return True
    return rows <= 4 and (weight.in_features >= 2048 or weight.out_features <= 4096)


def takes_norm(weight: Any, rows: int, gated: bool = False) -> bool:
    """True if small_batch can fuse the norm of its input, which every block then computes redundantly."""
    if not isinstance(weight, Packed) or not 0 < rows <= 8 or weight.in_features % 8:
        return False
    if weight.format == INT4 and rows > 1:
        return False
    return fits(weight, rows, gated=gated, normed=True)


def _small_batch_product(
    x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype | None, format: int | None = None
) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, weight.in_features)
    out: Tensor = small_batch(rows, weight, bias, dtype or x.dtype, format)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features)


def small_batch(
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    dtype: torch.dtype,
    format: int | None = None,
    norm: tuple[Tensor, float, float] | None = None,
    stream: Tensor | None = None,
    gate: int = -1,
) -> Any:
    """The product of x [1…16 rows, in_features] bf16. `format`: that of the weight, or INT4_WIDE for an INT4 weight.

    With `norm` (weight, eps, offset) the product is of norm(x + stream); returns (product, x + stream). With `gate` (a
    number of Activation) the first half of the outputs are gates of the second half.
    """
    x = x if x.stride(0) % 8 == 0 else x.contiguous()
    out = x.new_empty(len(x), weight.out_features // 2 if gate >= 0 else weight.out_features, dtype=dtype)
    after = None if stream is None else torch.empty_like(stream)
    weights = weight.data, weight.records, weight.scale, bias, weight.format if format is None else format, weight.group
    _small_batch_op(out, x, *weights, True, stream, after, *(norm or (None, 0.0, 0.0)), gate)
    return out if norm is None else (out, after)
