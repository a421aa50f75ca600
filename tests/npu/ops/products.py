"""Quantised matrix products, and the packing and the formats of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .rules import FLOATS, HALF, Call, Changes, Op, contiguous, dtype_of, rule, unsupported

MAX_WIDTH = 65535
WORD = 8  # int4 numbers in an int32
QINT8 = 12  # torch's number of qint8
# torch's numbers of dtypes, which schemas with `int? output_dtype` get.
DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def dtype_from(number: Any, default: torch.dtype) -> torch.dtype:
    """The dtype of an argument that is a dtype, its number, or None."""
    return number if isinstance(number, torch.dtype) else DTYPES[number] if number is not None else default


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows, and their scales float32."""
    scales = x.float().abs().amax(-1) / 127
    rounded = (x.float() / scales.clamp(min=1e-30)[..., None]).round().clamp(-128, 127)
    return rounded.to(torch.int8), scales


def unpacked(words: Tensor) -> Tensor:
    """int32 words [..., n / 8] -> numbers -8…7 [..., n] float32. The first number is in the lowest bits."""
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32)
    return ((((words[..., None] >> shifts) & 15) ^ 8) - 8).flatten(-2).float()


class DynamicQuant(Op):
    names = ("npu::npu_dynamic_quant",)

    def example(self) -> Changes:
        return {"input": torch.randn(3, 32).bfloat16()}

    def check(self, c: Call) -> None:
        name = "npu_dynamic_quant"
        unsupported(c.group_index)
        rule(dtype_of(c.input, *HALF), f"{name}: the input is float16 or bfloat16")
        rule(c.input.dim() > 1, f"{name}: the input has more than 1 dimension")
        is_smooth = c.smooth_scales is None or c.smooth_scales.shape == c.input.shape[-1:]
        rule(is_smooth, f"{name}: smooth_scales have the last dimension of the input")
        is_same = c.smooth_scales is None or c.smooth_scales.dtype == c.input.dtype
        rule(is_same, f"{name}: smooth_scales have the dtype of the input")
        rule(dtype_from(c.dst_type, torch.int8) == torch.int8, f"{name}: the reference has int8 only")

    def compute(self, c: Call) -> Any:
        return quantised(c.input if c.smooth_scales is None else c.input.float() * c.smooth_scales.float())

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "float16 or bfloat16", {"input": c.input.float()}
        yield "more than 1 dimension", {"input": c.input[0]}
        yield "last dimension", {"smooth_scales": torch.ones(16).bfloat16()}
        yield "dtype of the input", {"smooth_scales": torch.ones(32)}
        yield "int8 only", {"dst_type": 3}


class Quantize(Op):
    """Rounds by static scales."""

    names = ("npu::npu_quantize",)

    def example(self) -> Changes:
        scales, zeros = torch.tensor([20.0]).bfloat16(), torch.tensor([-10.0]).bfloat16()
        x = torch.randn(3, 32).bfloat16()
        return {"input": x, "scales": scales, "zero_points": zeros, "dtype": QINT8, "axis": -1, "div_mode": False}

    def check(self, c: Call) -> None:
        name, zeros = "npu_quantize", c.zero_points
        rule(dtype_of(c.input, *FLOATS), f"{name}: the input is float32, float16 or bfloat16")
        rule(not c.div_mode, f"{name}: the reference multiplies by scales only")
        rule(dtype_of(c.scales, *FLOATS), f"{name}: scales are float32, float16 or bfloat16")
        is_alike = zeros is None or (zeros.shape, zeros.dtype) == (c.scales.shape, c.scales.dtype)
        rule(is_alike, f"{name}: zero_points have the shape and the dtype of scales")
        rule(-2 <= c.axis < c.input.dim(), f"{name}: axis is at least -2, and an axis of the input")
        elements = c.input.shape[-2 if c.axis == -2 else -1]
        rule(
            c.scales.dim() == 1 and len(c.scales) in (1, elements), f"{name}: scales have 1 value, or that of the axis"
        )
        rule(c.dtype in (QINT8, torch.qint8), f"{name}: the reference has qint8 only")

    def shapes(self, c: Call) -> Any:
        return torch.empty(c.input.shape, dtype=torch.int8, device="meta")

    def compute(self, c: Call) -> Any:
        zeros = 0.0 if c.zero_points is None else c.zero_points.float()
        return (c.input.float() * c.scales.float() + zeros).round().clamp(-128, 127).to(torch.int8)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "input is float32", {"input": c.input.double()}
        yield "multiplies by scales", {"div_mode": True}
        yield "scales are float32", {"scales": c.scales.double()}
        yield "of scales", {"zero_points": c.zero_points.float()}
        yield "at least -2", {"axis": -3}
        yield "1 value", {"scales": torch.ones(5).bfloat16(), "zero_points": None}
        yield "qint8 only", {"dtype": 3}


class DequantSwigluQuant(Op):
    names = ("npu::npu_dequant_swiglu_quant",)

    def example(self) -> Changes:
        return {"x": torch.randn(3, 32).bfloat16(), "activate_left": True, "quant_mode": 1}

    def check(self, c: Call) -> None:
        name = "npu_dequant_swiglu_quant"
        unsupported(c.quant_scale, c.quant_offset, c.group_index, c.dst_type, c.activate_dim)
        rule(c.x.dim() == 2 and c.x.shape[1] % 2 == 0, f"{name}: x has 2 dimensions, and the last is even")
        rule(dtype_of(c.x, torch.int32, torch.bfloat16), f"{name}: x is int32 or bfloat16")
        scales = (c.weight_scale, c.activation_scale, c.bias)
        is_plain = c.x.dtype == torch.int32 or all(scale is None for scale in scales)
        rule(is_plain, f"{name}: bfloat16 has no weight_scale, activation_scale or bias")
        has_scales = c.x.dtype != torch.int32 or not (c.weight_scale is None or c.activation_scale is None)
        rule(has_scales, f"{name}: int32 has weight_scale and activation_scale")
        rule(c.quant_mode == 1, f"{name}: the reference has dynamic quantisation only")
        rule(c.swiglu_mode == 0, f"{name}: the reference has swiglu_mode 0 only")

    def compute(self, c: Call) -> Any:
        x = c.x.float()
        if c.x.dtype == torch.int32:
            x = (x if c.bias is None else x + c.bias) * c.weight_scale.float() * c.activation_scale.float()[:, None]
        left, right = x.chunk(2, -1)
        gate, up = (left, right) if c.activate_left else (right, left)
        return quantised(F.silu(gate) * up)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "the last is even", {"x": c.x[:, :31]}
        yield "int32 or bfloat16", {"x": c.x.float()}
        yield "bfloat16 has no", {"weight_scale": torch.ones(1, 32)}
        yield "int32 has weight_scale", {"x": c.x.int()}
        yield "dynamic quantisation", {"quant_mode": 0}
        yield "swiglu_mode 0", {"swiglu_mode": 1}


# dtype of the output -> dtypes of scale and bias, without and with pertoken_scale: the table of the documentation.
_PLAIN = {
    torch.float16: ((torch.float32, torch.int64), (torch.int32,)),
    torch.int8: ((torch.float32, torch.int64), (torch.int32,)),
    torch.bfloat16: ((torch.float32, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    torch.int32: ((torch.float32, torch.bfloat16), (torch.int32,)),
}
_PER_TOKEN = {
    torch.bfloat16: _PLAIN[torch.bfloat16],
    torch.float16: ((torch.float32,), (torch.int32, torch.float16, torch.float32)),
}


class QuantMatmul(Op):
    names = ("npu::npu_quant_matmul",)

    def example(self) -> Changes:
        return {
            "x1": torch.randint(-128, 127, (3, 32), dtype=torch.int8),
            "x2": torch.randint(-128, 127, (32, 16), dtype=torch.int8),
            "scale": torch.rand(16),
            "pertoken_scale": torch.rand(3),
            "bias": torch.randn(16),
            "output_dtype": torch.bfloat16,
        }

    def check(self, c: Call) -> None:
        name = "npu_quant_matmul"
        unsupported(c.offset, c.group_sizes, c.y_scale, c.x1_dtype, c.x2_dtype)
        output = dtype_from(c.output_dtype, torch.int8)
        rule(c.x1.dtype == c.x2.dtype == torch.int8, f"{name}: x1 and x2 are int8")
        rule(2 <= c.x1.dim() <= 6 and c.x2.dim() == 2, f"{name}: x1 has 2 to 6, x2 has 2 dimensions")
        rule(c.x1.shape[-1] == c.x2.shape[0], f"{name}: x1 and x2 have the same inner dimension")
        rule(c.x1.numel() > 0 and c.x2.numel() > 0, f"{name}: x1 and x2 are not empty")
        rule(max(c.x1.shape[-1], c.x2.shape[-1]) <= MAX_WIDTH, f"{name}: last dimensions are at most {MAX_WIDTH}")
        outputs = c.x2.shape[-1]
        rule(c.scale.shape in ((1,), (outputs,)), f"{name}: scale has 1 value, or one for each output")
        table = _PLAIN if c.pertoken_scale is None else _PER_TOKEN
        rule(output in table, f"{name}: output_dtype is in the table of the documentation")
        scales, biases = table[output]
        rule(dtype_of(c.scale, *scales), f"{name}: the dtype of scale fits output_dtype")
        rule(dtype_of(c.bias, *biases), f"{name}: the dtype of bias fits output_dtype")
        rule(c.bias is None or c.bias.shape[-1:] == (outputs,), f"{name}: bias has one value for each output")
        is_rows = c.pertoken_scale is None or c.pertoken_scale.shape == (c.x1.shape[-2],)
        rule(
            is_rows and dtype_of(c.pertoken_scale, torch.float32), f"{name}: pertoken_scale has a float32 for each row"
        )

    def compute(self, c: Call) -> Any:
        output = dtype_from(c.output_dtype, torch.int8)
        product = (c.x1.double() @ c.x2.double()).float()
        is_early = c.bias is not None and c.bias.dtype == torch.int32
        product = (product + c.bias if is_early else product) * c.scale.float()
        if c.pertoken_scale is not None:
            product = product * c.pertoken_scale[:, None]
        if c.bias is not None and not is_early:
            product = product + c.bias.float()
        return product.round().clamp(-128, 127).to(output) if output == torch.int8 else product.to(output)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "are int8", {"x1": c.x1.int()}
        yield "2 to 6", {"x1": c.x1[0]}
        yield "same inner dimension", {"x2": c.x2[:16]}
        yield "not empty", {"x1": c.x1[:0]}
        wide = torch.zeros(32, 65536, dtype=torch.int8)
        yield "are at most", {"x2": wide, "scale": torch.ones(65536), "bias": None}
        yield "scale has 1 value", {"scale": c.scale[:8]}
        yield "table of the documentation", {"output_dtype": torch.int8}
        yield "dtype of scale", {"scale": c.scale.half()}
        yield "dtype of bias", {"bias": c.bias.half()}
        yield "bias has one value", {"bias": c.bias[:8]}
        yield "for each row", {"pertoken_scale": c.pertoken_scale.bfloat16()}


class ConvertWeightToInt4Pack(Op):
    """The device interleaves the numbers of a word; here the first is in the lowest bits. Only the ops read words."""

    names = ("npu::npu_convert_weight_to_int4pack",)

    def example(self) -> Changes:
        return {"weight": torch.randint(-8, 8, (32, 16), dtype=torch.int32)}

    def check(self, c: Call) -> None:
        name = "npu_convert_weight_to_int4pack"
        rule(dtype_of(c.weight, torch.int32), f"{name}: the weight is int32")
        rule(c.weight.dim() == 2, f"{name}: the weight has 2 dimensions")
        rule(contiguous(c.weight), f"{name}: the weight is contiguous")
        rule(c.weight.shape[-1] % WORD == 0, f"{name}: the last dimension is a multiple of 8")

    def shapes(self, c: Call) -> Any:
        return torch.empty(c.weight.shape[0], c.weight.shape[1] // WORD, dtype=torch.int32, device="meta")

    def compute(self, c: Call) -> Any:
        if c.weight.numel() and not -8 <= int(c.weight.min()) <= int(c.weight.max()) <= 7:
            raise ValueError("npu_convert_weight_to_int4pack: a number is not in -8…7")
        shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int32)
        return ((c.weight.unflatten(1, (-1, WORD)) & 15) << shifts).sum(-1, dtype=torch.int32)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "is int32", {"weight": c.weight.to(torch.int8)}
        yield "2 dimensions", {"weight": c.weight[None]}
        yield "contiguous", {"weight": c.weight.T}
        yield "multiple of 8", {"weight": c.weight[:, :12].contiguous()}


def dequantised(weight: Tensor, scale: Tensor, offset: Tensor | None, group: int = 0) -> Tensor:
    """(weight + offset) * scale, float32. weight [k, n]; scale [n], or [groups, n] for `group` inputs each."""
    numbers = unpacked(weight) if weight.dtype == torch.int32 else weight.float()
    inputs = len(numbers)

    def spread(x: Tensor) -> Tensor:
        return x.float().repeat_interleave(group, 0)[:inputs] if group else x.float()

    return (numbers if offset is None else numbers + spread(offset)) * spread(scale)


class WeightQuantBatchmatmul(Op):
    names = ("npu::npu_weight_quant_batchmatmul",)

    def example(self) -> Changes:
        return {
            "x": torch.randn(3, 64).bfloat16(),
            "weight": torch.randint(-(2**31), 2**31 - 1, (64, 2), dtype=torch.int32),
            "antiquant_scale": torch.rand(2, 16).bfloat16(),
            "antiquant_offset": torch.randn(2, 16).bfloat16(),
            "bias": torch.randn(16),
            "antiquant_group_size": 32,
        }

    def check(self, c: Call) -> None:
        name = "npu_weight_quant_batchmatmul"
        unsupported(c.quant_scale, c.quant_offset, c.weight_dtype)
        rule(dtype_of(c.x, *HALF), f"{name}: x is float16 or bfloat16")
        rule(dtype_of(c.weight, torch.int8, torch.int32), f"{name}: the weight is int8, or int4 in int32")
        rule(c.x.dim() == c.weight.dim() == 2, f"{name}: x and the weight have 2 dimensions")
        inner, outputs = c.weight.shape[0], c.weight.shape[1] * (WORD if c.weight.dtype == torch.int32 else 1)
        rule(c.x.shape[1] == inner, f"{name}: x and the weight have the same inner dimension")
        rule(max(inner, outputs) <= MAX_WIDTH, f"{name}: the weight has at most {MAX_WIDTH} inputs and outputs")
        rule(c.x.numel() > 0, f"{name}: x is not empty")
        rule(c.antiquant_scale.dtype == c.x.dtype, f"{name}: antiquant_scale has the dtype of x")
        group = c.antiquant_group_size
        rule(
            group == 0 or (group % 32 == 0 and 32 <= group < inner),
            f"{name}: antiquant_group_size is a multiple of 32, less than the inputs",
        )
        shapes = [(-(-inner // group), outputs)] if group else [(1,), (1, 1), (outputs,), (1, outputs)]
        rule(tuple(c.antiquant_scale.shape) in shapes, f"{name}: antiquant_scale has the groups and the outputs")
        offset = c.antiquant_offset
        is_offset = offset is None or (offset.shape, offset.dtype) == (c.antiquant_scale.shape, c.antiquant_scale.dtype)
        rule(is_offset, f"{name}: antiquant_offset has the shape and the dtype of antiquant_scale")
        bias = torch.float32 if c.x.dtype == torch.bfloat16 else torch.float16
        rule(dtype_of(c.bias, bias), f"{name}: bias is float32 for bfloat16, float16 for float16")
        rule(c.bias is None or c.bias.shape[-1] in (1, outputs), f"{name}: bias has one value for each output")

    def compute(self, c: Call) -> Any:
        product = c.x.float() @ dequantised(c.weight, c.antiquant_scale, c.antiquant_offset, c.antiquant_group_size)
        return (product if c.bias is None else product + c.bias.float()).to(c.x.dtype)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "x is float16", {"x": c.x.float()}
        yield "int8, or int4", {"weight": c.weight.long()}
        yield "2 dimensions", {"x": c.x[None]}
        yield "same inner dimension", {"x": c.x[:, :32]}
        yield "inputs and outputs", {"weight": torch.zeros(64, 8192, dtype=torch.int32)}
        yield "x is not empty", {"x": c.x[:0]}
        yield "antiquant_scale has the dtype", {"antiquant_scale": c.antiquant_scale.half()}
        yield "multiple of 32", {"antiquant_group_size": 64}
        yield "groups and the outputs", {"antiquant_scale": c.antiquant_scale[:1]}
        yield "antiquant_offset has", {"antiquant_offset": c.antiquant_offset[:1]}
        yield "bias is float32", {"bias": c.bias.half()}
        yield "bias has one value", {"bias": c.bias[:8]}


class Prefetch(Op):
    names = ("npu::npu_prefetch",)

    def example(self) -> Changes:
        return {"input": torch.randn(8, 8), "dependency": torch.randn(2), "max_size": 64}

    def check(self, c: Call) -> None:
        rule(c.max_size > 0, "npu_prefetch: max_size is more than 0")
        size = c.input.numel() * c.input.element_size()
        rule(0 <= c.offset < size, "npu_prefetch: offset is within the weight")

    def compute(self, c: Call) -> Any:
        return None

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "more than 0", {"max_size": 0}
        yield "within the weight", {"offset": 256}


OPS = (
    *(DynamicQuant(), Quantize(), DequantSwigluQuant(), QuantMatmul(), ConvertWeightToInt4Pack()),
    *(WeightQuantBatchmatmul(), Prefetch()),
)
