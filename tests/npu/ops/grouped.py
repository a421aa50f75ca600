"""The grouped matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .products import WORD, dequantised, dtype_from
from .rules import FLOATS, HALF, Call, Changes, Op, contiguous, dtype_of, rule, unsupported

NAME = "npu_grouped_matmul"
MAX_WIDTH, MAX_GROUPS, MAX_LIST = 65536, 1024, 128


def _fast_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {0: torch.Tensor.float, 1: F.relu, 2: partial(F.gelu, approximate="tanh"), 4: _fast_gelu, 5: F.silu}


class GroupedMatmul(Op):
    """One tensor of rows sorted by group, and one output. The weights are one tensor [groups, k, n], or a list."""

    names = (f"npu::{NAME}",)

    def example(self) -> Changes:
        return {
            "x": [torch.randn(6, 32).bfloat16()],
            "weight": [torch.randn(3, 32, 16).bfloat16()],
            "group_list": torch.tensor([2, 0, 4]),
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        }

    def check(self, c: Call) -> None:
        unsupported(c.offset, c.activation_input, c.activation_quant_scale, c.activation_quant_offset, c.bias)
        rule(len(c.x) == 1 and c.group_type == 0, f"{NAME}: the reference has one x and group_type 0")
        x = c.x[0]
        rule(c.split_item in (2, 3), f"{NAME}: one output needs split_item 2 or 3")
        dims = 3 if len(c.weight) == 1 else 2
        rule(all(w.dim() == dims for w in c.weight), f"{NAME}: one weight has 3 dimensions, those of a list have 2")
        rule(len(c.weight) <= MAX_LIST, f"{NAME}: a list of weights has at most {MAX_LIST}")
        rule(len({w.shape for w in c.weight}) == 1, f"{NAME}: the weights of a list have one shape")
        is_uniform = len({w.is_contiguous() for w in c.weight}) == 1
        rule(is_uniform, f"{NAME}: all weights of a list are transposed, or none")
        rule(x.dim() == 2, f"{NAME}: x has 2 dimensions")
        rule(contiguous(x), f"{NAME}: x is not transposed")
        self._check_groups(c)
        inner, outputs = c.weight[0].shape[-2:]
        rule(x.shape[1] == inner, f"{NAME}: x and the weight have the same inner dimension")
        rule(max(inner, outputs) < MAX_WIDTH, f"{NAME}: last dimensions are less than {MAX_WIDTH}")
        is_activated = c.act_type == 0 or c.per_token_scale is not None
        rule(is_activated and c.act_type in ACTIVATIONS, f"{NAME}: act_type 1, 2, 4 and 5 need per_token_scale")
        (self._check_int8 if x.dtype == torch.int8 else self._check_floats)(c, x, c.weight[0])

    def _check_groups(self, c: Call) -> None:
        counts = c.group_list
        is_list = counts is not None and counts.dim() == 1 and counts.dtype == torch.int64
        rule(is_list, f"{NAME}: group_list is int64 with 1 dimension")
        groups = len(c.weight) if len(c.weight) > 1 else len(c.weight[0])
        rule(
            len(counts) == groups <= MAX_GROUPS,
            f"{NAME}: group_list has a number for each of at most {MAX_GROUPS} groups",
        )
        rule(c.group_list_type in (0, 1), f"{NAME}: group_list_type is 0 (sums) or 1 (counts)")
        rule(c.group_list_type == 0 or len(counts) > 1, f"{NAME}: a list of counts has more than one group")

    def _check_int8(self, c: Call, x: Tensor, weight: Tensor) -> None:
        rule(weight.dtype == torch.int8, f"{NAME}: int8 rows have int8 weights")
        scale = c.scale[0] if c.scale else None
        is_scale = scale is not None and scale.shape == (len(weight), weight.shape[2])
        rule(is_scale, f"{NAME}: int8 has a scale for each output")
        allowed = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.int8: torch.int64}
        is_dtype = scale.dtype == allowed.get(dtype_from(c.output_dtype, x.dtype))
        rule(is_dtype, f"{NAME}: the dtype of scale fits output_dtype")
        rows = c.per_token_scale[0] if c.per_token_scale else None
        is_rows = rows is None or (rows.shape == x.shape[:1] and rows.dtype == torch.float32)
        rule(is_rows, f"{NAME}: per_token_scale has a float32 for each row")

    def _check_floats(self, c: Call, x: Tensor, weight: Tensor) -> None:
        is_float = dtype_of(x, *FLOATS) and dtype_from(c.output_dtype, x.dtype) == x.dtype
        rule(is_float, f"{NAME}: rows are floats, and the output has their dtype")
        if weight.dtype == x.dtype:
            return
        is_integer = dtype_of(weight, torch.int8, torch.int32) and dtype_of(x, *HALF)
        rule(is_integer, f"{NAME}: weights have the dtype of x, int8 or int4")
        self._check_scales(c, x, weight)

    def _check_scales(self, c: Call, x: Tensor, weight: Tensor) -> None:
        ends = (len(weight), weight.shape[2] * (WORD if weight.dtype == torch.int32 else 1))
        scale, offset = ((part[0] if part else None) for part in (c.antiquant_scale, c.antiquant_offset))
        is_scale = scale is not None and scale.dtype == x.dtype and (scale.shape[0], scale.shape[-1]) == ends
        rule(is_scale, f"{NAME}: integer weights have an antiquant_scale for each output, in the dtype of x")
        rule(offset is not None and offset.shape == scale.shape, f"{NAME}: antiquant_offset has the shape of the scale")
        is_group = scale.dim() == 2 or (weight.dtype == torch.int32 and weight.shape[1] % scale.shape[1] == 0)
        rule(is_group, f"{NAME}: groups of inputs need int4, and divide the inputs")

    def compute(self, c: Call) -> Any:
        x = c.x[0]
        weights = c.weight if len(c.weight) > 1 else list(c.weight[0])
        sizes = c.group_list if c.group_list_type == 1 else c.group_list.diff(prepend=c.group_list.new_zeros(1))
        if int(sizes.sum()) != len(x) or int(sizes.min()) < 0:
            raise ValueError(f"{NAME}: the groups have {int(sizes.sum())} of {len(x)} rows")
        parts = [self._product(c, rows, weights[group], group) for group, rows in enumerate(x.split(sizes.tolist()))]
        product = torch.cat(parts)
        if c.per_token_scale:
            product = ACTIVATIONS[c.act_type](product * c.per_token_scale[0][:, None])
        return [product.to(dtype_from(c.output_dtype, x.dtype))]

    def _product(self, c: Call, rows: Tensor, weight: Tensor, group: int) -> Tensor:
        if c.antiquant_scale:
            scale, offset = c.antiquant_scale[0][group], c.antiquant_offset[0][group]
            size = len(weight) // len(scale) if scale.dim() == 2 else 0
            return rows.float() @ dequantised(weight, scale, offset, size)
        product = rows.float() @ weight.float()
        return product * c.scale[0][group].float() if c.scale else product

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        (x,), (weight,) = c.x, c.weight
        parts = list(weight)
        yield "one x and", {"x": [x, x]}
        yield "split_item 2 or 3", {"split_item": 0}
        yield "those of a list have 2", {"weight": [weight[0]]}
        yield "at most 128", {"weight": [weight[0]] * 129}
        yield "have one shape", {"weight": [*parts[:2], parts[2][:, :8]]}
        yield "transposed, or none", {"weight": [*parts[:2], parts[2].T.contiguous().T]}
        yield "x has 2 dimensions", {"x": [x[None]]}
        yield "not transposed", {"x": [torch.randn(32, 6).bfloat16().T]}
        yield "int64 with 1 dimension", {"group_list": c.group_list.int()}
        yield "each of at most 1024 groups", {"group_list": c.group_list[:2]}
        yield "0 (sums) or 1", {"group_list_type": 2}
        yield "more than one group", {"group_list": c.group_list[:1], "weight": [weight[:1]]}
        yield "same inner dimension", {"x": [x[:, :16].contiguous()]}
        yield "less than 65536", {"weight": [torch.empty(3, 32, 65536, device="meta")]}
        yield "need per_token_scale", {"act_type": 5}
        yield "rows are floats", {"output_dtype": torch.float16}
        yield "dtype of x, int8 or int4", {"weight": [weight.float()]}
        yield from self._wrong_integers(x.to(torch.int8), weight)

    def _wrong_integers(self, x: Tensor, weight: Tensor) -> Iterator[tuple[str, Changes]]:
        scale = torch.ones(3, 16).bfloat16()
        bytes_ = {"x": [x], "weight": [weight.to(torch.int8)], "output_dtype": torch.bfloat16}
        yield "int8 rows have int8", {**bytes_, "weight": [weight]}
        yield "scale for each output", {**bytes_, "scale": [scale[:, :8]]}
        yield "fits output_dtype", {**bytes_, "scale": [scale.half()]}
        yield "float32 for each row", {**bytes_, "scale": [scale], "per_token_scale": [torch.ones(5)]}
        words = {"weight": [torch.zeros(3, 32, 2, dtype=torch.int32)]}
        yield "for each output, in the dtype", {**words, "antiquant_scale": [scale[:, :8]]}
        yield "shape of the scale", {**words, "antiquant_scale": [scale], "antiquant_offset": [scale[:2]]}
        uneven = [torch.ones(3, 5, 16).bfloat16()]
        yield "divide the inputs", {**words, "antiquant_scale": uneven, "antiquant_offset": uneven}


OPS = (GroupedMatmul(),)
