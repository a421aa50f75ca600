"""Experts of one token with bfloat16 or fp8 weights: products of vectors, for targets with descriptors.

One kernel computes gate_up and the gate, another one down and the weighted sum. The second kernel starts before the
first one has ended, and reads its weights into registers first. moe_product.py has the products for all other cases.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.moe import Routed
from .moe_product import _gated
from .overlap import follow_previous, overlapping
from .target import Target
from .widen import Quantised, e4m3, record_of

TOP_K = 8  # the number of experts for which the block sizes are tuned, on H200
UP_PAIRS = 8  # gates, and ups, of a program
UP_INPUTS = 512  # inputs of a block
DOWN_OUTPUTS = 2  # outputs of a program
DOWN_INPUTS = 1024  # largest number of inputs of down
WARPS = 4


@triton.jit
def one_token_up_kernel(
    out, x, data, experts, inner, pitch,
    IN: tl.constexpr, GATE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (block of PAIRS gates and as many ups, choice) -> out [choices, inner]. x [IN]. GATE: as in _gated."""
    follow_previous(OVERLAP)
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    lane = tl.arange(0, 2 * PAIRS)
    output = expert * 2 * inner + lane // PAIRS * inner + tl.program_id(0) * PAIRS + lane % PAIRS
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((2 * PAIRS, BLOCK_K), tl.float32)
    for base in tl.static_range(0, IN, BLOCK_K):
        weight = tl.load(data + output[:, None] * pitch + (base + k)[None, :])
        sums += weight.to(tl.float32) * tl.load(x + base + k).to(tl.float32)[None, :]
    total = tl.sum(sums, 1).to(out.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(total.reshape(2, PAIRS).permute(1, 0))
    column = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tl.store(out + choice * inner + column, _gated(gate, up, GATE).to(out.dtype.element_ty))


@triton.jit
def one_token_down_kernel(
    out, x, data, experts, weights, hidden, inner, pitch,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs) -> out [hidden]: the weighted sum over all choices. x [TOP_K, inner].

    The experts and the weights of their results are read before the previous kernel has ended: an earlier kernel wrote
    them. BLOCK_K: `inner`, rounded up to a power of two.
    """
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    choice = tl.arange(0, TOP_K)
    expert = tl.load(experts + choice).to(tl.int64)
    row = expert[:, None] * hidden + output[None, :]
    inside = k < inner
    weight = tl.load(data + row[:, :, None] * pitch + k[None, None, :], mask=inside[None, None, :], other=0)
    share = tl.load(weights + choice)
    follow_previous(OVERLAP)
    activations = tl.load(x + choice[:, None] * inner + k[None, :], mask=inside[None, :], other=0).to(tl.float32)
    activations = activations * share[:, None]
    total = tl.sum(tl.sum(weight.to(tl.float32) * activations[:, None, :], 0), 1)
    tl.store(out + output, total.to(out.dtype.element_ty))


@triton.jit
def _scales(
    scale, output, base, inputs, subs,
    RECORDS: tl.constexpr, ONE: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The scales of the outputs [N], for the inputs from `base` to base + BLOCK_K - 1 -> [N, BLOCK_K / SUB, 1]. ONE: an
    output has one scale."""
    part = base // SUB + tl.arange(0, BLOCK_K // SUB)
    part = tl.where(part * SUB < inputs, part, 0)
    if ONE:
        part *= 0
    factor, _ = record_of(scale, scale, output[:, None], part[None, :], 0, subs, False, RECORDS)
    return factor[:, :, None]


@triton.jit
def one_token_up_fp8_kernel(
    out, x, data, scale, experts, inner, pitch, subs,
    IN: tl.constexpr, GATE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
    ONE: tl.constexpr, RECORDS: tl.constexpr, ASSEMBLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Like one_token_up_kernel. SUB inputs of an output have the same scale; ONE: all inputs."""
    follow_previous(OVERLAP)
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    lane = tl.arange(0, 2 * PAIRS)
    output = expert * 2 * inner + lane // PAIRS * inner + tl.program_id(0) * PAIRS + lane % PAIRS
    k = tl.arange(0, BLOCK_K // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    sums = tl.zeros((2 * PAIRS, BLOCK_K // SUB, SUB), tl.float32)
    for base in tl.static_range(0, IN, BLOCK_K):
        byte = tl.load(data + output[:, None, None] * pitch + (base + k)[None, :, :])
        weight = e4m3(byte, x.dtype.element_ty, ASSEMBLY).to(tl.float32)
        weight *= _scales(scale, output, base, IN, subs, RECORDS, ONE, BLOCK_K, SUB)
        sums += weight * tl.load(x + base + k).to(tl.float32)[None, :, :]
    total = tl.sum(tl.sum(sums, 2), 1).to(out.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(total.reshape(2, PAIRS).permute(1, 0))
    column = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tl.store(out + choice * inner + column, _gated(gate, up, GATE).to(out.dtype.element_ty))


@triton.jit
def one_token_down_fp8_kernel(
    out, x, data, scale, experts, weights, hidden, inner, pitch, subs,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
    ONE: tl.constexpr, RECORDS: tl.constexpr, ASSEMBLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Like one_token_down_kernel. SUB inputs of an output have the same scale; ONE: all inputs."""
    line = tl.arange(0, TOP_K * BLOCK_N)
    choice = line // BLOCK_N
    expert = tl.load(experts + choice).to(tl.int64)
    output = expert * hidden + tl.program_id(0) * BLOCK_N + line % BLOCK_N
    k = tl.arange(0, BLOCK_K // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = k < inner
    byte = tl.load(data + output[:, None, None] * pitch + k[None, :, :], mask=inside[None, :, :], other=0)
    factor = _scales(scale, output, 0, inner, subs, RECORDS, ONE, BLOCK_K, SUB)
    share = tl.load(weights + choice)
    follow_previous(OVERLAP)
    from_choice = x + choice[:, None, None] * inner + k[None, :, :]
    activations = tl.load(from_choice, mask=inside[None, :, :], other=0).to(tl.float32)
    products = e4m3(byte, x.dtype.element_ty, ASSEMBLY).to(tl.float32) * factor * activations
    sums = tl.sum(tl.sum(products, 2), 1) * share
    total = tl.sum(sums.reshape(TOP_K, BLOCK_N), 0)
    tl.store(out + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), total.to(out.dtype.element_ty))


def supports_one_token(routed: Routed, gate_up: Quantised, down: Quantised, has_bias: bool) -> bool:
    """True if `one_token` supports the arguments, with bfloat16 activations."""
    hidden, inner = gate_up.in_features, down.in_features
    has_blocks = hidden % UP_INPUTS == 0 and inner % UP_PAIRS == 0 and inner <= DOWN_INPUTS
    if routed.experts.shape != (1, TOP_K) or has_bias or not has_blocks:
        return False
    return all(_is_bfloat16(each) for each in (gate_up, down)) or all(_is_fp8(each) for each in (gate_up, down))


def _is_bfloat16(weight: Quantised) -> bool:
    return weight.data.dtype == torch.bfloat16 and weight.data.stride(0) % 8 == 0


def _is_fp8(weight: Quantised) -> bool:
    """True for fp8 weights with one scale for each output, or for 64, 128 or 256 of its inputs."""
    grouped = weight.sub in (64, 128, 256)
    return weight.format == "fp8" and weight.data.stride(0) % 16 == 0 and (grouped or weight.subs == 1)


def one_token(x: Tensor, routed: Routed, gate_up: Quantised, down: Quantised, gate: int, target: Target) -> Tensor:
    """The experts' output for x [1, hidden]. `gate`: an index in GATES."""
    hidden, inner = gate_up.in_features, down.in_features
    activations = x.new_empty(TOP_K, inner)
    out = torch.empty_like(x)
    up_grid = inner // UP_PAIRS, TOP_K
    down_grid = (hidden // DOWN_OUTPUTS,)
    block_k = triton.next_power_of_2(inner)
    options = {"num_warps": WARPS, **overlapping(target.overlaps)}
    if gate_up.format == "fp8":
        one_token_up_fp8_kernel[up_grid](
            activations, x, gate_up.data, gate_up.scale, routed.experts, inner, gate_up.data.stride(0), gate_up.subs,
            hidden, gate, UP_PAIRS, UP_INPUTS, *_fp8(gate_up, UP_INPUTS), target.assembly, target.overlaps,
            **options,
        )  # fmt: skip
        one_token_down_fp8_kernel[down_grid](
            out, activations, down.data, down.scale, routed.experts, routed.weights, hidden, inner,
            down.data.stride(0), down.subs, TOP_K, DOWN_OUTPUTS, block_k, *_fp8(down, block_k), target.assembly,
            target.overlaps, **options,
        )  # fmt: skip
        return out
    one_token_up_kernel[up_grid](
        activations, x, gate_up.data, routed.experts, inner, gate_up.data.stride(0),
        hidden, gate, UP_PAIRS, UP_INPUTS, target.overlaps, **options,
    )  # fmt: skip
    one_token_down_kernel[down_grid](
        out, activations, down.data, routed.experts, routed.weights, hidden, inner, down.data.stride(0),
        TOP_K, DOWN_OUTPUTS, block_k, target.overlaps, **options,
    )  # fmt: skip
    return out


def _fp8(weight: Quantised, block_k: int) -> tuple[int, bool, str]:
    """The constants SUB, ONE and RECORDS of a weight."""
    one = weight.subs == 1
    return min(128 if one else weight.sub, block_k), one, weight.records
