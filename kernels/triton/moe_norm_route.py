"""The norm before a mixture of experts and its router, for few tokens, in one launch.

Each program computes the norm of a token and the logits of some experts. The last program of a token chooses
its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.moe import Routed, Routing
from .moe_route import choice_of, choose
from .overlap import follow_previous, overlapping
from .target import counters, device_properties

MAX_TOKENS = 8
MAX_HIDDEN = 8192  # a program keeps the weights of its experts in registers
EXPERTS = 4  # experts per program
COUNTERS = MAX_TOKENS  # finished programs of each token


class Normed(NamedTuple):
    """The input of the experts, and the experts of each token."""

    x: Tensor  # [tokens, hidden], normalised
    stream: Tensor  # [tokens, hidden], the residual stream before the norm
    routed: Routed


@triton.jit
def norm_route_kernel(
    experts, weights, normed, after, logits, x, stream, norm, router, bias, correction, counters,
    eps, offset, scale, hidden, pitch,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (block of experts, token). counters [tokens] are zero before and after the kernel.

    x and stream [tokens, hidden]. normed receives the norm of their sum, after their sum, and logits [tokens, experts]
    the logits. The weights are read before the previous kernel has ended.
    """
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden
    expert = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = expert < GROUPS * SIZE
    from_router = router + expert.to(tl.int64)[:, None] * pitch + column[None, :]
    weight = tl.load(from_router, mask=exists[:, None] & inside[None, :], other=0.0)
    factor = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32) + offset
    follow_previous(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    at = token * hidden + column
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(after.dtype.element_ty)  # normalise the rounded sum, as it is stored
    wide = total.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps) * factor
    result = wide.to(normed.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(after + at, total, mask=inside)
        tl.store(normed + at, result, mask=inside)
    logit = tl.sum(weight.to(tl.float32) * result.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        logit += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    from_token = logits + token * (GROUPS * SIZE)
    tl.store(from_token + expert, logit, mask=exists)
    tl.debug_barrier()  # all threads have written their logits before the counter is incremented
    if tl.atomic_add(counters + token, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters + token, 0)
        choose(
            experts, weights, token, from_token, correction, scale,
            TOP_K, SIGMOID, RENORMALISE, HAS_CORRECTION, GROUPS, TOP_GROUPS, TOP2, SIZE,
            BLOCK_GROUPS, BLOCK_SIZE, BLOCK_K, PAIRS,
        )  # fmt: skip


def supports_norm_route(x: Tensor, norm: Tensor, router: Tensor, correction: Tensor | None) -> bool:
    """True if `norm_route` supports the arguments."""
    tokens, hidden = x.shape
    fits = 0 < tokens <= MAX_TOKENS and hidden <= MAX_HIDDEN
    one_dtype = x.dtype == norm.dtype == router.dtype
    plain = norm.is_contiguous() and router.stride(1) == 1
    return fits and one_dtype and plain and (correction is None or correction.dtype == torch.float32)


def norm_route(
    x: Tensor, stream: Tensor, norm: tuple[Tensor, float, float], router: Tensor, bias: Tensor | None,
    routing: Routing, correction: Tensor | None,
) -> Normed:  # fmt: skip
    """The norm of x + stream [tokens, hidden], and the experts that the router [experts, hidden] chooses for it.
    `norm`: weight, eps and offset."""
    tokens, hidden = x.shape
    count = len(router)
    weight, eps, offset = norm
    normed = torch.empty_like(x)
    after = torch.empty_like(x)
    logits = x.new_empty(tokens, count, dtype=torch.float32)
    routed = Routed(
        x.new_empty(tokens, routing.top_k, dtype=torch.int32), x.new_empty(tokens, routing.top_k, dtype=torch.float32)
    )
    choice = choice_of(routing, count, correction is not None)
    block_h = triton.next_power_of_2(hidden)
    target = device_properties(x.device).target
    norm_route_kernel[(triton.cdiv(count, EXPERTS), tokens)](
        *routed, normed, after, logits, x, stream, weight, router,
        logits if bias is None else bias, logits if correction is None else correction, counters(x.device, COUNTERS),
        eps, offset, routing.scale, hidden, router.stride(0),
        *choice, bias is not None, EXPERTS, block_h, target.overlaps,
        num_warps=warps_of(block_h, target.lanes), **overlapping(target.overlaps),
    )  # fmt: skip
    return Normed(normed, after, routed)


def warps_of(block_h: int, lanes: int) -> int:
    """The warps of a program with 128 or 256 threads."""
    return (128 if block_h <= 4096 else 256) // lanes
