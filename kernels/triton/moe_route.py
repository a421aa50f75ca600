"""The router of a mixture of experts, and the sort of its choices by expert. kernels/ops/moe.py defines the router.

A choice is one expert of one token; choice i belongs to token i // top_k. The number of choices of an expert is known
only on the GPU, so the host launches for the largest number of tiles that is possible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import moe as reference
from ..ops.moe import Routed, Routing
from .overlap import follow_previous, overlapping
from .target import device_properties

BLOCK = 1024  # choices of a program that sorts
MAX_PAIRED = 256  # up to this number of experts, all pairs are compared
ONE_LAUNCH = 2048  # largest number of choices that one launch sorts


@triton.jit
def _best_groups(choice, group, index, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """`choice` [groups, group size], with -inf for the experts of all groups but the best TOP_GROUPS."""
    best = tl.max(choice, 1)
    if TOP2:
        first = tl.min(tl.where(choice == best[:, None], index, 0x7FFFFFFF), 1)
        best += tl.max(tl.where(index == first[:, None], float("-inf"), choice), 1)
    keep = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(best, 0)
        winner = tl.min(tl.where((best == top) & ~keep, group, 0x7FFFFFFF), 0)
        keep = keep | (group == winner)
        best = tl.where(group == winner, float("-inf"), best)
    return tl.where(keep[:, None], choice, float("-inf"))


@triton.jit
def _store_best(
    experts, weights, token, score, choice, index, exists, scale,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the TOP_K experts of a token with the best `choice`. The rank of an expert is the number of better ones.

    A key is an integer, in the order of `choice`; its low half decides between equal values.
    """
    choice += 0.0  # -0.0 is 0.0
    number = tl.where(exists, index, COUNT + index)  # padding comes after all experts
    bits = choice.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    key = tl.reshape((bits.to(tl.int64) << 32) + (0x7FFFFFFF - number), (BLOCK,))
    rank = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
    score = tl.reshape(score, (BLOCK,))
    number = tl.reshape(number, (BLOCK,))
    chosen = rank < TOP_K
    if RENORMALISE:
        total = tl.sum(tl.where(chosen, score, 0.0), 0)
        score = score / tl.maximum(total, 1e-20, propagate_nan=tl.PropagateNan.ALL)
    tl.store(experts + token * TOP_K + rank, number, mask=chosen)
    tl.store(weights + token * TOP_K + rank, score * scale, mask=chosen)


@triton.jit
def _store_best_in_turn(
    experts, weights, token, score, choice, index, exists, scale,
    TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, COUNT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Like _store_best, for so many experts that all pairs would not fit in registers."""
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.zeros((BLOCK_K,), tl.float32)
    free = exists
    for k in tl.static_range(TOP_K):
        top = tl.max(tl.max(choice, 1), 0)
        candidate = tl.where((choice == top) & free, index, COUNT - 1)
        winner = tl.min(tl.min(candidate, 1), 0)
        free = free & (index != winner)
        choice = tl.where(index == winner, float("-inf"), choice)
        chosen = tl.where(rank == k, winner, chosen)
        value = tl.sum(tl.sum(tl.where(index == winner, score, 0.0), 1), 0)
        weight = tl.where(rank == k, value, weight)
    if RENORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-20, propagate_nan=tl.PropagateNan.ALL)
    tl.store(experts + token * TOP_K + rank, chosen, mask=rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, weight * scale, mask=rank < TOP_K)


@triton.jit
def choose(
    experts, weights, token, logits, correction, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of a token. logits: those of the token. SIZE: experts of a group. PAIRS: all pairs of experts
    fit in registers."""
    group = tl.arange(0, BLOCK_GROUPS)
    place = tl.arange(0, BLOCK_SIZE)
    index = group[:, None] * SIZE + place[None, :]
    exists = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    logit = tl.load(logits + index, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        exponential = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = exponential / tl.sum(tl.sum(exponential, 1), 0)
    choice = score
    if HAS_CORRECTION:
        choice += tl.load(correction + index, mask=exists, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, float("inf"))  # NaN comes first, as in the reference
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:
        choice = _best_groups(choice, group, index, TOP_GROUPS, TOP2 and SIZE > 1)
    if PAIRS:
        # In padded groups, indices are not unique: padding is numbered by its place in the block.
        number = tl.where(exists, index, group[:, None] * BLOCK_SIZE + place[None, :])
        _store_best(
            experts, weights, token, score, choice, number, exists, scale,
            TOP_K, RENORMALISE, GROUPS * SIZE, BLOCK_GROUPS * BLOCK_SIZE,
        )  # fmt: skip
    else:
        _store_best_in_turn(
            experts, weights, token, score, choice, index, exists, scale, TOP_K, RENORMALISE, GROUPS * SIZE, BLOCK_K
        )


@triton.jit
def _route(
    experts, weights, logits, correction, stride, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program `token` chooses the experts of a token."""
    follow_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    choose(
        experts, weights, token, logits + token * stride, correction, scale,
        TOP_K, SIGMOID, RENORMALISE, HAS_CORRECTION, GROUPS, TOP_GROUPS, TOP2, SIZE,
        BLOCK_GROUPS, BLOCK_SIZE, BLOCK_K, PAIRS,
    )  # fmt: skip


class Choice(NamedTuple):
    """The constants of `choose`, in the order of its arguments."""

    top_k: int
    sigmoid: bool
    renormalise: bool
    has_correction: bool
    groups: int
    top_groups: int
    top2: bool
    size: int
    block_groups: int
    block_size: int
    block_k: int
    pairs: bool

    def warps(self, lanes: int) -> int:
        """The warps of a program: an expert for each thread, if each warp has this number of lanes."""
        return max(1, self.block_groups * self.block_size // lanes) if self.pairs else 1


def choice_of(routing: Routing, experts: int, has_correction: bool) -> Choice:
    size = experts // routing.groups
    block_groups = triton.next_power_of_2(routing.groups)
    block_size = triton.next_power_of_2(size)
    return Choice(
        routing.top_k,
        routing.score == "sigmoid",
        routing.renormalise,
        has_correction,
        routing.groups,
        routing.top_groups,
        routing.group_score == "top2",
        size,
        block_groups,
        block_size,
        triton.next_power_of_2(routing.top_k),
        block_groups * block_size <= MAX_PAIRED,
    )


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    tokens, experts = logits.shape
    if logits.dtype != torch.float32 or (correction is not None and correction.dtype != torch.float32):
        return reference.route(logits, routing, correction)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = logits.new_empty(tokens, routing.top_k, dtype=torch.int32)
    weights = logits.new_empty(tokens, routing.top_k)
    choice = choice_of(routing, experts, correction is not None)
    target = device_properties(logits.device).target
    if tokens:
        _route[(tokens,)](
            chosen, weights, logits, logits if correction is None else correction, logits.stride(0), routing.scale,
            *choice, target.overlaps, num_warps=choice.warps(target.lanes), **overlapping(target.overlaps),
        )  # fmt: skip
    return Routed(chosen, weights)


class Sorted(NamedTuple):
    """The choices in the order of their experts, in tiles of rows that share an expert."""

    order: Tensor  # [choices] int32: the choice at each position
    tiles: Tensor  # [3, tiles] int32: expert, first position, position after the last one; expert -1: no tile


@triton.jit
def _write_tiles(
    tiles, expert, start, count, first_tile, all_tiles, tile_count, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the tiles of an expert with `count` choices, and one of the tiles that are left over."""
    for first in range(0, count, ROWS * BLOCK):
        begin = first + tl.arange(0, BLOCK) * ROWS
        inside = begin < count
        tile = first_tile + begin // ROWS
        tl.store(tiles + tile, begin * 0 + expert, mask=inside)
        tl.store(tiles + tile_count + tile, start + begin, mask=inside)
        tl.store(tiles + 2 * tile_count + tile, start + tl.minimum(begin + ROWS, count), mask=inside)
    left = all_tiles + expert
    tl.store(tiles + left, -1, mask=left < tile_count)


@triton.jit(do_not_specialize=["choices", "tile_count"])
def _sort(
    order, tiles, experts, choices, tile_count,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program `own` reads all choices, and writes the positions and the tiles of the expert `own`."""
    follow_previous(OVERLAP)
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, choices, BLOCK):
        exists = first + lane < choices
        chosen = tl.load(experts + first + lane, mask=exists, other=0)
        counts += tl.histogram(chosen, BLOCK_E, exists)
    before = expert < own
    start = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(expert == own, counts, 0), 0)
    tile_counts = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(before, tile_counts, 0), 0)
    _write_tiles(tiles, own, start, count, first_tile, tl.sum(tile_counts, 0), tile_count, ROWS, 32)
    for first in range(0, choices, BLOCK):
        chosen = tl.load(experts + first + lane, mask=first + lane < choices, other=-1)
        match = (chosen == own).to(tl.int32)
        tl.store(order + start + tl.cumsum(match, 0) - 1, first + lane, mask=match > 0)
        start += tl.sum(match, 0)


@triton.jit(do_not_specialize=["choices"])
def _rank(ranks, counts, experts, choices, BLOCK: tl.constexpr):
    """ranks [choices]: different numbers for all choices of an expert, from 0 on. counts [experts]: zeros before."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = choice < choices
    chosen = tl.load(experts + choice, mask=exists, other=0)
    tl.store(ranks + choice, tl.atomic_add(counts + chosen, 1, mask=exists, sem="relaxed"), mask=exists)


@triton.jit(do_not_specialize=["choices", "expert_count", "tile_count"])
def _place(
    order, tiles, ranks, counts, experts, choices, expert_count, tile_count,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs write the tiles of an expert each, the others the positions of BLOCK choices each."""
    own = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(counts + expert, mask=expert < expert_count, other=0)
    end = tl.cumsum(count, 0)
    if own < expert_count:
        tile_counts = (count + ROWS - 1) // ROWS
        first_tile = tl.sum(tl.where(expert < own, tile_counts, 0), 0)
        own_count = tl.sum(tl.where(expert == own, count, 0), 0)
        start = tl.sum(tl.where(expert == own, end, 0), 0) - own_count
        _write_tiles(tiles, own, start, own_count, first_tile, tl.sum(tile_counts, 0), tile_count, ROWS, 32)
    else:
        choice = (own - expert_count) * BLOCK + tl.arange(0, BLOCK)
        exists = choice < choices
        chosen = tl.load(experts + choice, mask=exists, other=0)
        first = tl.gather(end - count, chosen, 0)
        tl.store(order + first + tl.load(ranks + choice, mask=exists, other=0), choice, mask=exists)


def sort_choices(chosen: Tensor, experts: int, rows: int, overlap: bool = False) -> Sorted:
    """chosen [tokens, top_k] int32 -> the choices sorted by expert, in tiles of up to `rows` choices. The order of the
    choices of an expert is not defined; results of products do not depend on it."""
    choices = chosen.numel()
    tile_count = min(choices // rows + experts, choices)  # an upper bound
    result = Sorted(chosen.new_empty(choices), chosen.new_empty(3, tile_count))
    block_e = triton.next_power_of_2(experts)
    if choices <= ONE_LAUNCH:
        block = min(BLOCK, triton.next_power_of_2(choices))
        _sort[(experts,)](
            result.order, result.tiles, chosen, choices, tile_count,
            rows, block_e, block, overlap, num_warps=4, **overlapping(overlap),
        )  # fmt: skip
        return result
    counts = chosen.new_zeros(experts)
    ranks = chosen.new_empty(choices)
    programs = triton.cdiv(choices, BLOCK)
    _rank[(programs,)](ranks, counts, chosen, choices, BLOCK, num_warps=4)
    _place[(experts + programs,)](
        result.order, result.tiles, ranks, counts, chosen, choices, experts, tile_count,
        rows, block_e, BLOCK, num_warps=4,
    )  # fmt: skip
    return result
