"""Mixture of experts, for all weight formats. kernels/ops/moe.py has the reference.

Up to FEW choices, each choice is a tile of one row. More choices are sorted by expert, so that an expert's weights are
read once for all rows of a tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..gpu.widened_product import MAX_CHUNK
from ..ops import moe as reference
from ..ops.linear import Fp8, Int4, Int8, Mxfp4, Weight
from ..ops.linear_mxfp4 import GROUP
from ..ops.moe import ExpertWeights, Routed
from . import linear
from .linear import Packed
from .moe_one_token import one_token, supports_one_token
from .moe_product import GATES, Blocks, Rows, combine, grouped
from .moe_route import route as route
from .moe_route import sort_choices
from .moe_tiles import multiply_tiles, supports_tiles
from .round_rows import round_rows
from .small_batch import MAX_IN_FEATURES
from .target import Device, device_properties, supports
from .widen import Quantised, block_inputs, widen_outputs

# The blocks of products with 16-bit weights, by the rows of a tile; tuned on H200.
DENSE = {
    16: Blocks(16, 64, 128, 4, 4),
    32: Blocks(32, 128, 128, 4, 3),
    64: Blocks(64, 256, 64, 8, 4),
    128: Blocks(128, 256, 64, 8, 4),
}
FEW = 32  # largest number of choices that are not sorted
WIDE_ROWS = 128  # smallest number of rows of a tile for which int4 and fp8 weights are dequantised into memory
FLOAT_SUMS = 4096  # largest number of choices whose outputs stay float32 until they are added


def pack_slices(slices: Iterable[Weight], experts: int, out_features: int, dtype: torch.dtype) -> Any:
    """The weight as linear.py packs it. MXFP4 weights stay plain."""
    slices = iter(slices)
    first = next(slices)
    slices = chain([first], slices)
    if isinstance(first, Mxfp4):
        return reference.pack_slices(slices, experts, out_features, dtype)
    return linear.pack_slices(slices, experts * out_features, dtype, of_experts=True)


def experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    gate_up = quantised(weights.gate_up, x.dtype)
    down = quantised(weights.down, x.dtype)
    if not is_supported(x, weights, gate_up, down):
        plain = weights._replace(gate_up=as_plain(weights.gate_up), down=as_plain(weights.down))
        return reference.experts(x, routed, plain)
    assert gate_up is not None
    assert down is not None
    return compute(x, routed, weights, gate_up, down)


def is_supported(x: Tensor, weights: ExpertWeights, gate_up: Quantised | None, down: Quantised | None) -> bool:
    """True if `compute` supports the arguments."""
    return supports(x) and gate_up is not None and down is not None and weights.gate in GATES


def as_plain(weight: Any) -> Any:
    """The weight as it was before packing."""
    return linear.plain(weight) if isinstance(weight, Packed) else weight


def quantised(weight: Any, dtype: torch.dtype) -> Quantised | None:
    """The weight as the kernels read it; None if they do not support it."""
    if isinstance(weight, Tensor):
        return _dense(weight, dtype)
    match weight:
        case Int8(data, scale):
            out_features, in_features = data.shape
            if in_features > MAX_IN_FEATURES:
                return None
            return Quantised("int8", data, scale, None, out_features, in_features, in_features)
        case Fp8(data, scale, group):
            out_features, in_features = data.shape
            if group < in_features and group % 32:
                return None
            return Quantised("fp8", data.view(torch.uint8), scale, None, out_features, in_features, group)
        case Mxfp4(data, exponent):
            out_features, in_features = len(data), 2 * data.shape[1]
            return Quantised("int4", data, exponent, None, out_features, in_features, GROUP, records="exponents")
        case Int4(data, scale, zero, group, in_features):
            return Quantised("int4", data, scale, zero, len(data), in_features, group)
        case Packed(data, records, group, in_features, is_by_half=False):
            return Quantised("int4", data, records, None, len(data), in_features, group, records="by_group")
    return None


def _dense(weight: Tensor, dtype: torch.dtype) -> Quantised | None:
    if weight.dtype != dtype or weight.stride(1) != 1:
        return None
    out_features, in_features = weight.shape
    return Quantised("dense", weight, weight, None, out_features, in_features, in_features)


def compute(x: Tensor, routed: Routed, weights: ExpertWeights, gate_up: Quantised, down: Quantised) -> Tensor:
    """The experts' output for x [tokens, hidden] of a supported dtype."""
    tokens, top_k = routed.experts.shape
    choices = tokens * top_k
    if choices == 0:
        return torch.zeros_like(x)
    device = device_properties(x.device)
    target = device.target
    x = x if x.stride(-1) == 1 else x.contiguous()
    gate = GATES.index(weights.gate)
    has_bias = weights.gate_up_bias is not None or weights.down_bias is not None
    if target.descriptors and x.dtype == torch.bfloat16 and supports_one_token(routed, gate_up, down, has_bias):
        return one_token(x, routed, gate_up, down, gate, target)
    sort = choices > FEW
    tiled = choices if sort else 0
    sizes = tiled, weights.experts, x.dtype, device
    first = blocks_of(gate_up, *sizes)
    second = blocks_of(down, *sizes)
    if sort:
        plan = sort_choices(routed.experts, weights.experts, first.m, target.overlaps)
        rows = Rows(plan.tiles, plan.order, top_k, target.overlaps, target.descriptors)
    else:
        rows = Rows(routed.experts.view(-1), None, top_k, target.overlaps)
    inner = x.new_empty(choices, weights.inner)
    prepared, scale = prepare(x, weights.op, weights.gate_up)
    multiply = partial(
        multiply_all if first.m < WIDE_ROWS else multiply_widened, rows, weights.experts, x, target.assembly
    )
    multiply(inner, prepared, scale, gate_up, weights.gate_up_bias, first, gate)
    prepared, scale = prepare(inner, weights.op, weights.down)
    y = x.new_empty(choices, x.shape[1], dtype=torch.float32 if choices <= FLOAT_SUMS else x.dtype)
    multiply(y, prepared, scale, down, weights.down_bias, second, -1)
    return combine(y, routed.weights, x.dtype, target.overlaps)


def multiply_all(
    rows: Rows, experts: int, like: Tensor, assembly: bool, out: Tensor, x: Tensor, scale: Tensor | None,
    weight: Quantised, bias: Tensor | None, blocks: Blocks, gate: int,
) -> None:  # fmt: skip
    """Writes the product with the weights of all experts into `out`."""
    grouped(out, x, scale, weight, bias, rows, blocks, experts, like, assembly, gate)


def multiply_widened(
    rows: Rows, experts: int, like: Tensor, assembly: bool, out: Tensor, x: Tensor, scale: Tensor | None,
    weight: Quantised, bias: Tensor | None, blocks: Blocks, gate: int,
) -> None:  # fmt: skip
    """Like multiply_all, for tiles of many rows. Int4 and fp8 weights are dequantised into memory, for some experts
    at a time: this is faster than in each tile."""
    if rows.has_tma and supports_tiles(weight, bias, experts, blocks):
        multiply_tiles(out, x, weight, rows, blocks, range(experts), like, gate)
        return
    if weight.format not in ("int4", "fp8"):
        multiply_all(rows, experts, like, assembly, out, x, scale, weight, bias, blocks, gate)
        return
    in_features = weight.in_features
    outputs = weight.out_features // experts
    count = min(experts, max(1, MAX_CHUNK // (outputs * in_features)))
    wide = x.new_empty(count * outputs, in_features)
    for start in range(0, experts, count):
        part = range(start, min(experts, start + count))
        data = wide[: len(part) * outputs]
        widen_outputs(weight, start * outputs, data)
        dense = Quantised("dense", data, data, None, len(data), in_features, in_features)
        if rows.has_tma and supports_tiles(dense, bias, len(part), blocks):
            multiply_tiles(out, x, dense, rows, blocks, part, like, gate)
        else:
            grouped(out, x, None, dense, bias, rows, blocks, experts, like, assembly, gate, part)


def prepare(x: Tensor, op: str, weight: Any) -> tuple[Tensor, Tensor | None]:
    """The activations as the product of this format reads them, and their scales."""
    if op == "int8":
        return round_rows(x)
    if op == "int4":
        return linear.rounded(x, weight.group), None
    return x, None


def blocks_of(weight: Quantised, choices: int, experts: int, dtype: torch.dtype, device: Device) -> Blocks:
    """The block sizes of a product. `choices`: 0 if they are not sorted. Tiles of both products have as many rows."""
    rows = rows_of(choices // experts, device)
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 32, 32, 4, 2)
    depth = block_inputs(weight.sub, weight.in_features, 128)
    if device.target.in_registers:
        return Blocks(rows, 64, min(depth, 64 if weight.format == "int8" else 32), 4, 2)
    if weight.format == "dense" or (rows >= WIDE_ROWS and weight.format != "int8"):
        return fitted(DENSE[rows], device.shared)
    return fitted(Blocks(rows, 64 if rows == 16 else 128, depth, 4, 3), device.shared)


def rows_of(per_expert: int, device: Device) -> int:
    """The rows of a tile, for `per_expert` choices of an expert."""
    if device.target.in_registers:
        return 16 if per_expert <= 12 else 32
    for rows, limit in ((16, 12), (32, 24), (64, 64)):
        if per_expert <= limit:
            return rows
    return 128


def fitted(blocks: Blocks, shared: int) -> Blocks:
    """The blocks with fewer stages or outputs, if `shared` bytes of shared memory are too few for 16-bit values."""
    stages = min(blocks.stages, shared // (2 * blocks.k * (blocks.m + blocks.n)))
    if stages >= 2:
        return blocks._replace(stages=stages)
    return fitted(blocks._replace(n=blocks.n // 2), shared)
