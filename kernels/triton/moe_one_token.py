"""Experts of one token, on NVIDIA Hopper: products of vectors, for all weight formats except MXFP4.

One kernel computes gate_up and the gate, another one down and the weighted sum. The second kernel starts before the
first one has ended, and reads its weights into registers first. moe_product.py has the products for all other cases.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.moe import Routed
from .moe_product import _gated
from .overlap import launch_dependents, overlapping, wait_for_previous
from .round_rows import _integers, _scale
from .widen import Quantised, e4m3, nibbles, record_of

# How activations are rounded: not, each row, or groups of as many inputs.
Round = Literal["none", "row"] | int

TOP_K = 8  # the number of experts for which the block sizes are tuned, on H200
UP_PAIRS = 8  # gates, and ups, of a program
UP_INPUTS = 512  # inputs of a block
DOWN_OUTPUTS = 2  # outputs of a program
DOWN_INT4_OUTPUTS = 4
DOWN_INPUTS = 1024  # largest number of inputs of down
WARPS = 4


@triton.jit
def one_token_up_kernel(
    out, x, data, experts, inner, pitch,
    IN: tl.constexpr, GATE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (block of PAIRS gates and as many ups, choice) -> out [choices, inner]. x [IN]. GATE: as in _gated."""
    if OVERLAP:
        wait_for_previous()
        launch_dependents()
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
    if OVERLAP:
        wait_for_previous()
        launch_dependents()
    activations = tl.load(x + choice[:, None] * inner + k[None, :], mask=inside[None, :], other=0).to(tl.float32)
    activations = activations * share[:, None]
    total = tl.sum(tl.sum(weight.to(tl.float32) * activations[:, None, :], 0), 1)
    tl.store(out + output, total.to(out.dtype.element_ty))


@triton.jit
def _largest(even, odd):
    """(largest magnitude, whether a value is NaN or infinite) in each row of two float32 matrices -> [rows, 1]."""
    size = tl.maximum(tl.abs(even), tl.abs(odd))
    broken = tl.where((tl.abs(even) < float("inf")) & (tl.abs(odd) < float("inf")), 0, 1)
    return tl.max(size, 1, keep_dims=True), tl.max(broken, 1, keep_dims=True)


@triton.jit
def _rounded(values, largest, wrong):
    """The values rounded to int8 and scaled back, as in round_rows.py, in float32."""
    integers = _integers(values, tl.where(wrong > 0, 0.0, largest))
    return tl.where(wrong > 0, float("nan"), integers * _scale(largest))


@triton.jit
def _of_rows(values, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The largest of PARTS values of each row, for each of them: [ROWS * PARTS, 1] -> [ROWS * PARTS, 1]."""
    largest = tl.max(values.reshape(ROWS, PARTS), 1, keep_dims=True)
    return largest.broadcast_to(ROWS, PARTS).reshape(ROWS * PARTS, 1)


@triton.jit
def _weights(byte, zero, dtype: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):
    """(even weights, odd weights) of int4, and twice the weights of int8 and fp8: without their scales, in float32."""
    if FORMAT == "int4":
        low, high = nibbles(byte, zero, dtype, PTX)
        even = low.to(tl.float32)
        odd = high.to(tl.float32)
    elif FORMAT == "int8":  # a byte + 128 in the lowest mantissa bits of 2^23 is the float 2^23 + 128 + byte
        even = ((byte ^ -128).to(tl.uint8, bitcast=True).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        even -= 8388736.0
        odd = even
    else:
        even = e4m3(byte, dtype, PTX).to(tl.float32)
        odd = even
    return even, odd


@triton.jit
def _stored(byte, FORMAT: tl.constexpr, RECORDS: tl.constexpr):
    """The position of a byte of an output's weights. widen.transposed_nibbles explains the order of int4."""
    if FORMAT == "int4" and RECORDS == "transposed":
        word = byte % 64 // 4
        byte = byte // 64 * 64 + (word % 4 * 4 + word // 4) * 4 + byte % 4
    return byte


@triton.jit
def _terms(
    byte, factor, zero, from_x, inside, largest, wrong,
    FORMAT: tl.constexpr, ROUND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Activations * weights, and with int4 the sums of two of them, in float32 [G, N, bytes]. `byte` [G, N, bytes] has
    the weights of N outputs, and `factor` and `zero` [G, N] their scales and zero points; `from_x` [G, bytes] points to
    the first activation of each byte. ROUND: the activations are rounded, `group`: those of the same scale together,
    `row`: with `largest` and `wrong` of their row."""
    dtype: tl.constexpr = from_x.dtype.element_ty
    even = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
    odd = even
    if FORMAT == "int4":
        odd = tl.load(from_x + 1, mask=inside, other=0.0).to(tl.float32)
    if ROUND == "group":
        largest, wrong = _largest(even, odd)
    if ROUND != "none":
        even = _rounded(even, largest, wrong)
        odd = _rounded(odd, largest, wrong)
    low, high = _weights(byte, zero[:, :, None], dtype, FORMAT, PTX)
    terms = low * even[:, None, :]
    if FORMAT == "int4":
        terms += high * odd[:, None, :]
    return terms * factor[:, :, None]


@triton.jit
def _records(
    scale, zero, output, part, inputs, all_outputs, subs,
    FORMAT: tl.constexpr, RECORDS: tl.constexpr, ONE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The scales and zero points with the numbers `part` of the outputs. ONE: an output has one scale."""
    part = tl.where(part * SUB < inputs, part, 0)
    if ONE:
        part *= 0
    return record_of(scale, zero, output, part, all_outputs, subs, FORMAT == "int4", RECORDS)


@triton.jit
def one_token_up_quantised_kernel(
    out, x, data, scale, zero, experts, inner, pitch, all_outputs, subs,
    IN: tl.constexpr, GATE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
    ONE: tl.constexpr, FORMAT: tl.constexpr, RECORDS: tl.constexpr, ROUND: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As one_token_up_kernel. SUB inputs of an output have the same scale; ONE: all inputs. ROUND: as in _terms."""
    BYTES: tl.constexpr = SUB // 2 if FORMAT == "int4" else SUB
    INPUTS: tl.constexpr = SUB // BYTES  # of a byte
    if OVERLAP:
        wait_for_previous()
        launch_dependents()
    choice = tl.program_id(1)
    expert = tl.load(experts + choice).to(tl.int64)
    lane = tl.arange(0, 2 * PAIRS)
    output = expert * 2 * inner + lane // PAIRS * inner + tl.program_id(0) * PAIRS + lane % PAIRS
    largest = tl.zeros((1, 1), tl.float32)
    wrong = tl.zeros((1, 1), tl.int32)
    if ROUND == "row":
        for base in tl.static_range(0, IN, BLOCK_K):
            values = tl.load(x + base + tl.arange(0, BLOCK_K)).to(tl.float32)[None, :]
            size, broken = _largest(values, values)
            largest = tl.maximum(largest, size)
            wrong |= broken
    part = tl.arange(0, BLOCK_K // SUB)
    byte = part[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    sums = tl.zeros((BLOCK_K // SUB, 2 * PAIRS, BYTES), tl.float32)
    for base in tl.static_range(0, IN, BLOCK_K):
        from_data = _stored(base // INPUTS + byte, FORMAT, RECORDS)
        stored = tl.load(data + output[None, :, None] * pitch + from_data[:, None, :])
        numbers = (base // SUB + part)[:, None]
        factor, shift = _records(
            scale, zero, output[None, :], numbers, IN, all_outputs, subs, FORMAT, RECORDS, ONE, SUB
        )  # fmt: skip
        from_x = x + base + byte * INPUTS
        sums += _terms(stored, factor, shift, from_x, byte >= 0, largest, wrong, FORMAT, ROUND, PTX)
    total = tl.sum(tl.sum(sums, 2), 0).to(out.dtype.element_ty).to(tl.float32)
    gate, up = tl.split(total.reshape(2, PAIRS).permute(1, 0))
    column = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tl.store(out + choice * inner + column, _gated(gate, up, GATE).to(out.dtype.element_ty))


@triton.jit
def one_token_down_quantised_kernel(
    out, x, data, scale, zero, experts, weights, hidden, inner, pitch, all_outputs, subs,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SUB: tl.constexpr,
    ONE: tl.constexpr, FORMAT: tl.constexpr, RECORDS: tl.constexpr, ROUND: tl.constexpr, PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """As one_token_down_kernel. SUB inputs of an output have the same scale; ONE: all inputs. ROUND: as in _terms."""
    BYTES: tl.constexpr = SUB // 2 if FORMAT == "int4" else SUB
    INPUTS: tl.constexpr = SUB // BYTES  # of a byte
    PARTS: tl.constexpr = BLOCK_K // SUB
    line = tl.arange(0, TOP_K * PARTS)
    choice = line // PARTS
    part = line % PARTS
    expert = tl.load(experts + choice).to(tl.int64)
    output = (expert * hidden)[:, None] + (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    byte = part[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    inside = byte * INPUTS < inner
    from_data = _stored(byte, FORMAT, RECORDS)
    stored = tl.load(data + output[:, :, None] * pitch + from_data[:, None, :], mask=inside[:, None, :], other=0)
    factor, shift = _records(scale, zero, output, part[:, None], inner, all_outputs, subs, FORMAT, RECORDS, ONE, SUB)
    share = tl.load(weights + choice)
    if OVERLAP:
        wait_for_previous()
        launch_dependents()
    from_x = x + choice[:, None] * inner + byte * INPUTS
    largest = tl.zeros((1, 1), tl.float32)
    wrong = tl.zeros((1, 1), tl.int32)
    if ROUND == "row":
        values = tl.load(from_x, mask=inside, other=0.0).to(tl.float32)
        size, broken = _largest(values, values)
        largest = _of_rows(size, TOP_K, PARTS)
        wrong = _of_rows(broken, TOP_K, PARTS)
    terms = _terms(stored, factor, shift, from_x, inside, largest, wrong, FORMAT, ROUND, PTX)
    total = tl.sum(tl.sum(terms, 2) * share[:, None], 0)
    tl.store(out + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), total.to(out.dtype.element_ty))


def supports_one_token(routed: Routed, gate_up: Quantised, down: Quantised, has_bias: bool, round_to: Round) -> bool:
    """True if `one_token` supports the arguments, with bfloat16 activations."""
    hidden, inner = gate_up.in_features, down.in_features
    has_blocks = hidden % UP_INPUTS == 0 and inner % UP_PAIRS == 0 and inner <= DOWN_INPUTS
    if routed.experts.shape != (1, TOP_K) or has_bias or not has_blocks or gate_up.format != down.format:
        return False
    return all(_has_lines(weight, round_to) for weight in (gate_up, down))


def _has_lines(weight: Quantised, round_to: Round) -> bool:
    """True if the kernels can read lines of the weights that share a scale."""
    if weight.format == "dense":
        return weight.data.dtype == torch.bfloat16 and weight.data.stride(0) % 8 == 0
    aligned = weight.data.stride(0) % 16 == 0
    grouped = weight.sub in (64, 128, 256)
    if weight.format == "int4":
        return aligned and grouped and weight.records != "exponents" and round_to in ("none", weight.sub)
    return aligned and (grouped or weight.subs == 1)


def one_token(
    x: Tensor, routed: Routed, gate_up: Quantised, down: Quantised, gate: int, round_to: Round, overlap: bool, ptx: bool
) -> Tensor:
    """The experts' output for x [1, hidden]. `gate`: an index in GATES. `ptx`: kernels may have PTX instructions."""
    hidden, inner = gate_up.in_features, down.in_features
    activations = x.new_empty(TOP_K, inner)
    out = torch.empty_like(x)
    up_grid = inner // UP_PAIRS, TOP_K
    block_k = triton.next_power_of_2(inner)
    options = {"num_warps": WARPS, **overlapping(overlap)}
    if gate_up.format != "dense":
        outputs = DOWN_INT4_OUTPUTS if down.format == "int4" else DOWN_OUTPUTS
        rounds = "group" if isinstance(round_to, int) else round_to
        one_token_up_quantised_kernel[up_grid](
            activations, x, *_tensors(gate_up), routed.experts, inner, *_sizes(gate_up),
            hidden, gate, UP_PAIRS, UP_INPUTS, *_constants(gate_up, UP_INPUTS), rounds, ptx, overlap, **options,
        )  # fmt: skip
        one_token_down_quantised_kernel[(hidden // outputs,)](
            out, activations, *_tensors(down), routed.experts, routed.weights, hidden, inner, *_sizes(down),
            TOP_K, outputs, block_k, *_constants(down, block_k), rounds, ptx, overlap, **options,
        )  # fmt: skip
        return out
    one_token_up_kernel[up_grid](
        activations, x, gate_up.data, routed.experts, inner, gate_up.data.stride(0),
        hidden, gate, UP_PAIRS, UP_INPUTS, overlap, **options,
    )  # fmt: skip
    one_token_down_kernel[(hidden // DOWN_OUTPUTS,)](
        out, activations, down.data, routed.experts, routed.weights, hidden, inner, down.data.stride(0),
        TOP_K, DOWN_OUTPUTS, block_k, overlap, **options,
    )  # fmt: skip
    return out


def _tensors(weight: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, the scales, and the zero points; the kernel does not read zero points that are None."""
    return weight.data, weight.scale, weight.scale if weight.zero is None else weight.zero


def _sizes(weight: Quantised) -> tuple[int, int, int]:
    """The bytes of an output, the number of outputs, and the number of scales of an output."""
    return weight.data.stride(0), weight.out_features, weight.subs


def _constants(weight: Quantised, block_k: int) -> tuple[int, bool, str, str]:
    """The constants SUB, ONE, FORMAT and RECORDS of a weight."""
    one = weight.subs == 1 and weight.format != "int4"
    return min(128 if one else weight.sub, block_k), one, weight.format, weight.records
