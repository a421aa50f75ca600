"""Experts of one token with bfloat16 weights, on NVIDIA Hopper: products of vectors.

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
from .overlap import launch_dependents, overlapping, wait_for_previous
from .widen import Quantised

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


def supports_one_token(routed: Routed, gate_up: Quantised, down: Quantised, has_bias: bool) -> bool:
    """True if `one_token` supports the arguments."""
    bfloat16 = all(each.dtype == torch.bfloat16 and each.stride(0) % 8 == 0 for each in (gate_up.data, down.data))
    hidden, inner = gate_up.in_features, down.in_features
    has_blocks = hidden % UP_INPUTS == 0 and inner % UP_PAIRS == 0 and inner <= DOWN_INPUTS
    return routed.experts.shape == (1, TOP_K) and bfloat16 and has_blocks and not has_bias


def one_token(x: Tensor, routed: Routed, gate_up: Quantised, down: Quantised, gate: int, overlap: bool) -> Tensor:
    """The experts' output for x [1, hidden]. `gate`: an index in GATES."""
    hidden, inner = gate_up.in_features, down.in_features
    activations = x.new_empty(TOP_K, inner)
    out = torch.empty_like(x)
    one_token_up_kernel[(inner // UP_PAIRS, TOP_K)](
        activations, x, gate_up.data, routed.experts, inner, gate_up.data.stride(0),
        hidden, gate, UP_PAIRS, UP_INPUTS, overlap, num_warps=WARPS, **overlapping(overlap),
    )  # fmt: skip
    one_token_down_kernel[(hidden // DOWN_OUTPUTS,)](
        out, activations, down.data, routed.experts, routed.weights, hidden, inner, down.data.stride(0),
        TOP_K, DOWN_OUTPUTS, triton.next_power_of_2(inner), overlap, num_warps=WARPS, **overlapping(overlap),
    )  # fmt: skip
    return out
