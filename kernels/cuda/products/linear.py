"""Products with packed weights on CUDA devices. kernels/ops/linear.py has the reference.

CUDA C++ multiplies rows of bfloat16: small_batch/kernel.cuh up to 16 rows if the GPU has enough shared memory,
tiled/kernel.cuh more rows with int8, int4 and fp8 weights, and fewer rows where it is faster. torch multiplies many
rows with int4 and fp8 weights that widen.cu dequantises, and plain weights. Triton (int8, int4, fp8) multiplies other
inputs, the reference those that Triton does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gpu.properties import gpu_properties
from ...gpu.widened_product import widened_product
from ...ops import linear as reference
from ...ops.linear import Fp8, Int4, Int8, Mxfp4, Weight, linear_mxfp4
from ...triton.problem import triton_problem

TRITON = not triton_problem()
_REFERENCES = reference.Linear()

SMALL_BATCH = 16  # largest number of rows that small_batch supports
BF16, INT8, INT4, INT4_WIDE, FP8, MXFP4, FP8_ROUNDED = range(7)  # values of Weights in product.h
_small_batch_op = torch.ops.localllm.small_batch.default
_small_batch_fits = torch.ops.localllm.small_batch_fits.default
_tiled_op = torch.ops.localllm.tiled_product.default
_widen_op = torch.ops.localllm.widen.default
_round_groups_op = torch.ops.localllm.round_groups.default
for _name in ("small_batch", "tiled_product", "widen", "round_groups"):
    torch.library.register_fake(f"localllm::{_name}", lambda *_: None, allow_override=True)

# The smallest number of rows for which `tiled` is faster than small_batch, and the largest number for which it is
# faster than torch with dequantised weights (int8: than torch); tuned on H200, with its own kernels and with those of
# older GPUs.
MIN_TILED_ROWS = {INT8: 17, INT4: 5, INT4_WIDE: 2, FP8: 3, FP8_ROUNDED: 3}
TILED_ROWS = {INT8: 32, INT4: 128, INT4_WIDE: 64, FP8: 64, FP8_ROUNDED: 64}
HOPPER_TILED_ROWS = {INT8: 1 << 20, INT4: 511, INT4_WIDE: 256, FP8: 2048, FP8_ROUNDED: 1 << 20}
HOPPER_GROUPED_FP8_ROWS = 256
NARROW_OUTPUTS = 32  # outputs per multiprocessor of a narrow product


class Packed(NamedTuple):
    """A weight [out_features, in_features] in the layout of small_batch/formats.cuh. No pending kernel may write it."""

    data: Tensor  # [out_features, bytes per output] uint8; bf16: [out_features, in_features]
    scale: Tensor | None  # [out_features] float32, for int8 and for fp8 without groups
    # [ceil(out_features / 8), subs, 8] int32. fp8: the bits of a float32 scale. int4: a float16 scale in the low half,
    # the zero point in the high half.
    records: Tensor | None
    format: int
    out_features: int
    in_features: int
    group: int  # inputs per scale; in_features if there is one scale per output or none
    rounds: bool = False  # Fp8.rounds

    def plain(self) -> Any:
        """The weight as it was before packing."""
        if self.format == BF16:
            return self.data
        eight_bits = self.data[:, : self.in_features]
        if self.format == INT8:
            assert self.scale is not None
            return Int8(eight_bits.view(torch.int8), self.scale)
        if self.format == FP8:
            return Fp8(eight_bits.view(torch.float8_e4m3fn), self._fp8_scale(), self.group, self.rounds)
        repeats = max(1, min(self.group, self.in_features) // sub_of(self.group, self.in_features))  # copies per scale
        groups = -(-self.in_features // self.group)
        records = by_output(self.records, self.out_features)[:, ::repeats][:, :groups]
        scale = (records & 0xFFFF).to(torch.int16).view(torch.float16)
        nibbles = transpose_words(self.data)[:, : -(-self.in_features // 2)]
        return Int4(nibbles, scale, (records >> 16).to(torch.uint8), self.group, self.in_features)

    def _fp8_scale(self) -> Tensor:
        if self.scale is not None:
            return self.scale[:, None]
        return by_output(self.records, self.out_features).view(torch.float32)


def sub_of(group: int, in_features: int) -> int:
    """The number of inputs of each stored scale and zero point of int4: 128 (a chunk), 64 or 32."""
    return 128 if group >= in_features else math.gcd(group, 128)


def by_output(records: Tensor | None, out_features: int) -> Tensor:
    """Packed.records [blocks, subs, 8], in blocks of eight outputs -> [out_features, subs]."""
    assert records is not None
    return records.transpose(1, 2).flatten(0, 1)[:out_features].contiguous()


def by_block(values: Tensor) -> Tensor:
    """`values` [out_features, subs] of 4 bytes each -> [ceil(out_features / 8), subs, 8] int32, padded with zeros."""
    values = torch.nn.functional.pad(values.contiguous().view(torch.int32), (0, 0, 0, -len(values) % 8))
    blocks: Tensor = values.unflatten(0, (-1, 8))
    return blocks.transpose(1, 2).contiguous()


def transpose_words(nibbles: Tensor) -> Tensor:
    """Transposes the 4 x 4 matrix of 32-bit words in each 64 bytes of nibbles [out_features, bytes]. Applied twice, it
    returns its input."""
    return nibbles.view(len(nibbles), -1, 4, 4, 4).transpose(2, 3).reshape(len(nibbles), -1)


def pack_slices(slices: Iterable[Weight], out_features: int, dtype: torch.dtype) -> Any:
    """The weight as `Packed`, or not packed if activations are not bfloat16 or if no kernel supports the weight. MXFP4
    weights become fp8."""
    slices = iter(slices)
    first = next(slices)
    if isinstance(first, Mxfp4):
        return pack_slices(linear_mxfp4.as_fp8(chain([first], slices)), out_features, dtype)
    if dtype != torch.bfloat16 or not _supported(first):
        return reference.pack_slices(chain([first], slices), out_features, dtype)
    merged: Packed | None = None
    start = 0
    for packed in map(_pack, chain([first], slices)):
        if merged is None:
            merged = _allocate_like(packed, out_features)
        stop = start + packed.out_features
        for target, source, outputs in zip(merged[:3], packed[:3], (1, 1, 8), strict=True):
            if target is not None and source is not None:
                target[start // outputs : -(-stop // outputs)] = source
        start = stop
    assert merged is not None
    if merged.data.is_cuda:  # wait, because later kernels prefetch weights before earlier kernels end
        torch.cuda.current_stream(merged.data.device).synchronize()
    return merged


def _allocate_like(packed: Packed, out_features: int) -> Packed:
    """A weight with `out_features` outputs in the layout of `packed`, not initialised."""
    data = packed.data.new_empty(out_features, packed.data.shape[1])
    scale = packed.scale
    if scale is not None:
        scale = scale.new_empty(out_features)
    records = packed.records
    if records is not None:
        records = records.new_empty(-(-out_features // 8), *records.shape[1:])
    return packed._replace(data=data, scale=scale, records=records, out_features=out_features)


def _supported(weight: Weight) -> bool:
    match weight:
        case Int8() | Int4():
            return True
        case Fp8():
            return weight.group >= weight.data.shape[1] or weight.group % 64 == 0
        case Mxfp4():
            return False
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 8 == 0


def _pack(weight: Weight) -> Packed:
    """Packs a slice of a supported weight; pads the bytes of each output to the size of a load."""
    pad = torch.nn.functional.pad
    match weight:
        case Int8(data, scale):
            out_features, in_features = data.shape
            data = pad(data.view(torch.uint8), (0, -in_features % 16))
            return Packed(data, scale.float(), None, INT8, out_features, in_features, in_features)
        case Fp8(data, scale, group, rounds):
            out_features, in_features = data.shape
            data = pad(data.view(torch.uint8), (0, -in_features % 16))
            if group >= in_features:
                return Packed(data, scale[:, 0].float(), None, FP8, out_features, in_features, in_features, rounds)
            return Packed(data, None, by_block(scale.float()), FP8, out_features, in_features, group)
        case Int4(data, scale, zero, group, in_features):
            sub = sub_of(group, in_features)
            repeats = -(-min(group, in_features) // sub)  # copies of each group's scale and zero point
            records = (scale.half().view(torch.int16).int() & 0xFFFF) | (zero.int() << 16)
            records = records.repeat_interleave(repeats, 1)[:, : -(-in_features // sub)]
            data = transpose_words(pad(data, (0, -data.shape[1] % 64)))
            return Packed(data, None, by_block(records), INT4, len(data), in_features, group)
    assert isinstance(weight, Tensor)
    return Packed(weight, None, None, BF16, weight.shape[0], weight.shape[1], weight.shape[1])


def dense(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if is_small_batch_of_bf16(x, weight, dtype):
        return _small_batch_product(x, weight, bias, dtype)
    plain = weight.data if isinstance(weight, Packed) else weight
    if dtype == torch.float32 and x.is_cuda and x.dtype == plain.dtype == torch.bfloat16:
        return _float32_product(x, plain, bias)
    return reference.dense(x, plain, bias, dtype)


def _float32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in float32. torch's linear would round it to bfloat16, and another kernel would convert it."""
    out = _float32_sums(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))


def _float32_sums(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def int8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_tiled(x, weight, INT8):
        return _tiled_product(x, weight, bias, dtype, INT8)
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    return _plain_product("int8", x, weight, bias, dtype)


def int4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_tiled(x, weight, INT4):
        return _tiled_product(x, weight, bias, dtype, INT4)
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    if _is_widened(x, weight):
        return _widened_product(_rounded(x, weight), weight, bias, dtype)
    if TRITON and isinstance(weight, Packed):
        return _int4_product(_triton().rounded(x, weight.group), weight, bias, dtype or x.dtype)
    return _plain_product("int4", x, weight, bias, dtype)


def int4_wide(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    if _is_tiled(x, weight, INT4_WIDE):
        return _tiled_product(x, weight, bias, dtype, INT4_WIDE)
    if _is_small_batch(x, weight, INT4_WIDE):
        return _small_batch_product(x, weight, bias, dtype, INT4_WIDE)
    if _is_widened(x, weight):
        return _widened_product(x, weight, bias, dtype)
    if TRITON and isinstance(weight, Packed):
        return _int4_product(x, weight, bias, dtype or x.dtype)
    return _plain_product("int4_wide", x, weight, bias, dtype)


def fp8(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    format = FP8_ROUNDED if isinstance(weight, Packed) and weight.rounds else FP8
    if _is_tiled(x, weight, format):
        return _tiled_product(x, weight, bias, dtype, format)
    if _is_small_batch(x, weight):
        return _small_batch_product(x, weight, bias, dtype)
    if _is_widened(x, weight):
        return _widened_product(x, weight, bias, dtype)
    return _plain_product("fp8", x, weight, bias, dtype)


def _is_widened(x: Tensor, weight: Any) -> bool:
    """True if torch multiplies x with the dequantised weight."""
    if not isinstance(weight, Packed) or weight.format not in (INT4, FP8) or not weight.out_features:
        return False
    if weight.in_features % 8:
        return False
    return x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > SMALL_BATCH * weight.in_features > 0


def _widened_product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    rows = x.reshape(-1, weight.in_features)
    out = widened_product(rows, weight.out_features, partial(widen, weight), _float32_sums, bias, dtype or x.dtype)
    return out.view(*x.shape[:-1], weight.out_features)


def widen(weight: Packed, start: int, out: Tensor) -> None:
    """Dequantises the outputs of an INT4 or FP8 weight from number `start` on, a multiple of 8, into `out`
    [outputs, in_features] bf16."""
    _widen_op(out, weight.data, weight.records, weight.scale, weight.format, weight.group, start)


def _rounded(x: Tensor, weight: Packed) -> Tensor:
    """x with each group of inputs rounded to int8 (linear_int8.rounded) and scaled back to bf16."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round_groups_op(out.view(-1, weight.in_features), with_vectors(x.reshape(-1, weight.in_features)), weight.group)
    return out


def mxfp4(x: Tensor, weight: Any, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The product with a weight that `pack_slices` converted to fp8, or with a plain weight."""
    return _plain_product("mxfp4" if isinstance(weight, Mxfp4) else "fp8", x, weight, bias, dtype)


def _plain_product(op: str, x: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """The product with the weight as it was before packing. Triton computes it if installed, else the reference."""
    implementations = _triton() if TRITON else _REFERENCES
    plain = weight.plain() if isinstance(weight, Packed) else weight
    out: Tensor = getattr(implementations, op)(x, plain, bias, dtype)
    return out


def _triton() -> Any:
    from ...triton import linear

    return linear


def _int4_product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product with a packed int4 weight, computed by Triton."""
    triton = _triton()
    out_features = weight.out_features
    in_features = weight.in_features
    sizes = out_features, in_features, sub_of(weight.group, in_features)
    quantised = triton.Quantised("int4", weight.data, weight.records, None, *sizes, records="transposed")
    out: Tensor = triton.product(x.reshape(-1, in_features), quantised, bias, dtype)
    return out.view(*x.shape[:-1], out_features)


def _is_small_batch(x: Tensor, weight: Any, format: int | None = None) -> bool:
    """True if small_batch supports x and the weight."""
    if not isinstance(weight, Packed) or not _has_vectors(x, weight):
        return False
    rows = x.numel() // weight.in_features
    return 0 < rows <= SMALL_BATCH and fits(weight, rows, format)


def _has_vectors(x: Tensor, weight: Packed) -> bool:
    """True if x is bfloat16 on the GPU, and its rows consist of whole, aligned vectors of 8 inputs."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.in_features % 8 or not weight.in_features:
        return False
    rows = x.numel() // weight.in_features
    return x.stride(-1) == 1 and (rows == 1 or x.stride(-2) % 8 == 0) and x.data_ptr() % 16 == 0


def _is_tiled(x: Tensor, weight: Any, format: int) -> bool:
    """True if `tiled` supports x and the weight, and is the fastest kernel."""
    if not isinstance(weight, Packed) or not _has_vectors(x, weight) or not weight.out_features:
        return False
    return _uses_tiled(x.device, x.numel() // weight.in_features, weight, format)


def _uses_tiled(device: torch.device, rows: int, weight: Packed, format: int) -> bool:
    """True if `tiled` multiplies this number of rows faster than the other kernels."""
    return MIN_TILED_ROWS[format] <= rows <= _max_tiled_rows(device, weight, format)


def _max_tiled_rows(device: torch.device, weight: Packed, format: int) -> int:
    if device.type != "cuda" or gpu_properties(device).capability[0] != 9:
        return TILED_ROWS[format]
    if format == FP8 and weight.records is not None:
        return HOPPER_GROUPED_FP8_ROWS
    return HOPPER_TILED_ROWS[format]


def _tiled_product(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype | None, format: int) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, weight.in_features)
    out = tiled(rows, weight, bias, dtype or x.dtype, format)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features)


def tiled(x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype, format: int) -> Tensor:
    """The product of x [rows, in_features] bf16, its rows aligned to 16 bytes -> [rows, out_features] in `dtype`.
    `format`: INT4 or INT4_WIDE for an INT4 weight, FP8 or FP8_ROUNDED for an FP8 weight; else the format of the weight.
    """
    out = x.new_empty(len(x), weight.out_features, dtype=dtype)
    _tiled_op(out, x, weight.data, weight.records, weight.scale, bias, format, weight.group, True)
    return out


def is_small_batch_of_bf16(x: Tensor, weight: Any, dtype: torch.dtype | None) -> bool:
    """True if small_batch supports x and a bf16 weight, and is faster than torch."""
    return _is_small_batch(x, weight) and _beats_torch(x.numel() // weight.in_features, weight, dtype)


def fits(weight: Packed, rows: int, format: int | None = None, gated: bool = False, normed: bool = False) -> bool:
    """True if the GPU has enough shared memory for small_batch with this weight and 1 to 16 rows
    (small_batch/plan.h)."""
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
    """True if small_batch is faster than torch for bf16 weights; tuned on H200 with scripts/bench/kernels.py. For
    float32 outputs (logits) torch needs an additional conversion. A product is narrow if torch's tiles of its outputs
    do not occupy all multiprocessors."""
    if dtype == torch.float32:
        return rows <= 8
    narrow = weight.out_features <= NARROW_OUTPUTS * gpu_properties(weight.data.device).processors
    deep = weight.in_features >= 2048
    if rows <= 4:
        return narrow or deep
    return narrow and deep


def format_of(op: str, weight: Packed) -> int:
    """The format in which the kernels multiply a weight of the product `op`."""
    return INT4_WIDE if op == "int4_wide" else weight.format


def can_fuse_norm(op: str, weight: Any, rows: int, gated: bool = False) -> bool:
    """True if small_batch is the fastest kernel and can fuse the norm of its input. Every thread block then computes
    the norm."""
    if not isinstance(weight, Packed) or not 0 < rows <= 8 or weight.in_features % 8:
        return False
    format = format_of(op, weight)
    if format in (INT4, INT4_WIDE) and rows > 1:
        return False
    if format in MIN_TILED_ROWS and _uses_tiled(weight.data.device, rows, weight, format):
        return False
    return fits(weight, rows, format, gated, normed=True)


def _small_batch_product(
    x: Tensor, weight: Packed, bias: Tensor | None, dtype: torch.dtype | None, format: int | None = None
) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, weight.in_features)
    out: Tensor = small_batch(rows, weight, bias, dtype or x.dtype, format)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.out_features)


def with_vectors(x: Tensor) -> Tensor:
    """x [rows, inputs], copied if its rows are not aligned to 16 bytes. `contiguous` returns a single row with any
    stride as it is."""
    is_aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


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
    """The product of x [1…16 rows, in_features] bf16. `format`: INT4_WIDE for an INT4 weight and activations that are
    not rounded; by default the format of the weight.

    With `norm` (weight, eps, offset) the kernel multiplies norm(x + stream), and the function returns
    (product, x + stream). With `gate` (a value of Activation in kernels.h) the first half of the outputs are gates of
    the second half, so the product has half as many outputs.
    """
    x = with_vectors(x)
    width = weight.out_features // 2 if gate >= 0 else weight.out_features
    out = x.new_empty(len(x), width, dtype=dtype)
    after = None if stream is None else torch.empty_like(stream)
    format = weight.format if format is None else format
    weights = weight.data, weight.records, weight.scale, bias, format, weight.group
    _small_batch_op(out, x, *weights, True, stream, after, *(norm or (None, 0.0, 0.0)), gate)
    return out if norm is None else (out, after)
