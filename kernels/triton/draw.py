"""A seeded draw among the tokens that pass the filters, without sorting and without synchronising with the host.

The key of a logit is an integer; keys have the order of the logits (noise.key_of).

The first kernel, `_survey`, reads every logit once. It writes the largest logit of each block, so that later passes
skip blocks without large logits, and the token with the largest logit + noise, which wins if no filter is on.

The second kernel, `_choose`, has one program per row. The noise of a token is fixed. So if the winner among all tokens
above a threshold passes the filters, it is also the winner among the tokens that pass the filters. top_p accepts the
winner if the probabilities of the tokens above it sum to less than top_p. Otherwise the winner's logit becomes the next
threshold. A nucleus of probability p takes about 1 + ln(1 / p) such passes. Bisection finds the smallest logit that
top_k accepts. It reads only the blocks whose largest logit is at least the k-th largest of all blocks' largest logits;
their number is little more than k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import sampling as reference
from ..ops.sampling import Draws
from .noise import LAST, draw_key, exponential, key_of, min_exponential

BLOCK = 128  # tokens
CHUNK = 16  # blocks of one program of the first kernel
GROUP = 16  # blocks that the second kernel reads per iteration
WARPS = 16  # warps of a program of the second kernel
LOWEST = tl.constexpr(-0x80000000)
LOG2_E = tl.constexpr(1.4426950408889634)
# Margin for rounding errors: a token whose bound is larger than the smallest known score times this factor cannot win.
ROUNDED = tl.constexpr(1.001)

# The addresses of these arguments depend on the number of rows. If Triton specialised on their alignment, it would
# compile another kernel at run time, which takes seconds.
_UNALIGNED = [
    *("temperature", "seed_low", "seed_high", "position", "top_k", "top_p", "min_p"),
    *("keys", "ids", "noisy", "noisy_ids", "maxima", "sums", "listed"),
]


class _Survey(NamedTuple):
    """Intermediate results that the first kernel writes and the second kernel reads."""

    keys: Tensor  # [rows, chunks] int32, key (noise.key_of) of the chunk's largest logit
    ids: Tensor  # [rows, chunks] int32, token with the chunk's largest logit
    noisy: Tensor  # [rows, chunks] float32, the chunk's largest logit / temperature + noise
    noisy_ids: Tensor  # [rows, chunks] int32, token of `noisy`
    maxima: Tensor  # [rows, blocks] float32, largest logit of each block; NaN counts as infinity
    sums: Tensor  # [rows, blocks] float32, sum of exp((logit - largest of the block) / temperature)
    listed: Tensor  # [rows, blocks] int32, scratch memory of the second kernel


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Computes in float32. Because of rounding, the token may differ from the reference's token if two scores, or a sum
    of probabilities and top_p, are almost equal."""
    if logits.dtype != torch.float32:
        return reference.draw(logits, draws)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    chunks = triton.cdiv(vocab, CHUNK * BLOCK)
    survey = _allocate(logits, rows, chunks)
    unread = draws.temperature  # argument in place of a filter that is off; the kernels do not read it
    filters = tuple(unread if values is None else values for values in (draws.top_k, draws.top_p, draws.min_p))
    seeds = draws.seed_low, draws.seed_high, draws.position
    top_k = draws.top_k is not None
    top_p = draws.top_p is not None
    min_p = draws.min_p is not None
    _survey[(chunks, rows)](
        logits, logits.stride(0), vocab, draws.temperature, *seeds, *filters[:2], *survey[:6],
        TOP_K=top_k, TOP_P=top_p, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _choose[(rows,)](
        tokens, logits, logits.stride(0), vocab, draws.temperature, *seeds, *filters, *survey, chunks,
        TOP_K=top_k, TOP_P=top_p, MIN_P=min_p, CHUNK=CHUNK, BLOCK=BLOCK, GROUP=GROUP,
        CHUNKS=triton.next_power_of_2(chunks), BLOCKS=triton.next_power_of_2(chunks * CHUNK), num_warps=WARPS,
    )  # fmt: skip
    return tokens


def _allocate(logits: Tensor, rows: int, chunks: int) -> _Survey:
    blocks = chunks * CHUNK
    sizes = [chunks * rows] * 4 + [blocks * rows] * 3
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device).split(sizes)
    keys, ids, noisy, noisy_ids, maxima, sums, listed = parts
    as_float = torch.float32
    return _Survey(keys, ids, noisy.view(as_float), noisy_ids, maxima.view(as_float), sums.view(as_float), listed)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _survey(
    logits, stride, vocab, temperature, seed_low, seed_high, position, top_k, top_p,
    keys, ids, noisy, noisy_ids, maxima, sums,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (chunk, row) reads CHUNK blocks of a row's logits."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    chunks = tl.num_programs(0)
    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    logits += row.to(tl.int64) * stride
    x = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    block_largest = tl.max(x, 1)
    largest = tl.max(block_largest, 0)
    key, token = _first_largest(logits, vocab, chunk * CHUNK, blocks, block_largest, largest, CHUNK, BLOCK)
    offset = row * chunks + chunk
    tl.store(keys + offset, key)
    tl.store(ids + offset, token)
    heat = tl.load(temperature + row)
    if heat != 0:
        into = row * chunks * CHUNK + blocks
        tl.store(maxima + into, block_largest)
        cool = 1.0 / heat
        share = 1.0
        if TOP_P:
            share = tl.load(top_p + row)
        if share < 1:
            base = tl.where(block_largest > float("-inf"), block_largest, 0.0)
            tl.store(sums + into, tl.sum(tl.exp((x - base[:, None]) * cool), 1))
        limit = vocab
        if TOP_K:
            limit = tl.load(top_k + row)
        if (limit <= 0) | (limit >= vocab):  # the row has no top_k; with top_k only the second kernel draws
            noise_key = draw_key(tl.load(seed_low + row), tl.load(seed_high + row), tl.load(position + row))
            largest = tl.where(largest > float("-inf"), largest, 0.0)
            # The score of a token is its exponential noise * exp((largest logit - logit) / temperature); the smallest
            # score wins. A lower bound of a score needs no logarithm, and in most cases the bounds show that only one
            # token can win.
            bound = min_exponential(noise_key, tokens) * tl.exp2((largest - x) * (cool * LOG2_E))
            # Beyond the vocabulary bounds are infinite, and smallest if all logits of the chunk are NaN or infinite.
            token = tl.min(tl.where((bound == tl.min(bound)) & (tokens < vocab), tokens, LAST))
            # LAST: no token was found, because all bounds are NaN. Then the first token of the chunk is drawn.
            token = tl.where(token == LAST, chunk * CHUNK * BLOCK, token)
            rival = tl.min(tl.where(tokens != token, bound, float("inf")))
            min_score = exponential(noise_key, token) * tl.exp((largest - tl.load(logits + token)) * cool)
            if (rival < float("inf")) & (rival <= min_score * ROUNDED):
                score = exponential(noise_key, tokens) * tl.exp((largest - x) * cool)
                min_score = tl.min(score)
                token = tl.min(tl.where(score == min_score, tokens, LAST))
            tl.store(noisy + offset, largest * cool - tl.log(min_score))
            tl.store(noisy_ids + offset, token)


@triton.jit
def _first_largest(
    logits, vocab, first, blocks, block_largest, largest, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(largest logit key, smallest token with this key) of a chunk that begins at block `first`.

    `largest`, the largest logit, is infinity if a logit is NaN. The key of NaN is larger than the key of infinity. So
    if `largest` is infinity, the function reads all blocks of the chunk again; otherwise it reads one block.
    """
    block = tl.min(tl.where(block_largest == largest, blocks, LAST), 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    key = key_of(largest)
    token = tl.min(tl.where(x == largest, ids, LAST), 0)
    if largest == float("inf"):
        every = first * BLOCK + tl.arange(0, CHUNK * BLOCK)
        keys = key_of(tl.load(logits + every, mask=every < vocab, other=float("-inf")))
        key = tl.max(keys, 0)
        token = tl.min(tl.where(keys == key, every, LAST), 0)
    return key, token


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _choose(
    out, logits, stride, vocab, temperature, seed_low, seed_high, position, top_k, top_p, min_p,
    keys, ids, noisy, noisy_ids, maxima, sums, listed, chunks,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program `row` draws the row's token."""
    row = tl.program_id(0)
    offset = row * chunks + tl.arange(0, CHUNKS)
    here = tl.arange(0, CHUNKS) < chunks
    chunk_keys = tl.load(keys + offset, mask=here, other=LOWEST)
    largest_key = tl.max(chunk_keys, 0)
    token = tl.min(tl.load(ids + offset, mask=here & (chunk_keys == largest_key), other=LAST), 0)
    heat = tl.load(temperature + row)
    logits += row.to(tl.int64) * stride
    largest = tl.load(logits + token)
    # If the row is greedy, or its largest logit is infinite or NaN, the token with the largest logit wins.
    if (heat != 0) & (tl.abs(largest) < float("inf")):
        blocks = chunks * CHUNK
        cool = 1.0 / heat
        maxima += row * blocks
        listed += row * blocks
        limit = vocab
        share = 1.0
        min_share = 0.0
        if TOP_K:
            limit = tl.load(top_k + row)
        if TOP_P:
            share = tl.load(top_p + row)
        if MIN_P:
            min_share = tl.load(min_p + row)
        noise_key = draw_key(tl.load(seed_low + row), tl.load(seed_high + row), tl.load(position + row))
        total = tl.full((), 0.0, tl.float32)
        min_key = tl.full((), LOWEST, tl.int32)  # tokens with a smaller logit key cannot win any more
        if (limit > 0) & (limit < vocab):
            min_key = _kth_key(logits, vocab, maxima, listed, blocks, limit, largest_key, BLOCK, GROUP, BLOCKS)
            count = _list(maxima, listed, blocks, min_key, BLOCKS)
            total = _weight(logits, vocab, cool, largest, listed, count, min_key, BLOCK, GROUP)
            token = _winner(logits, vocab, cool, largest, noise_key, listed, count, min_key, BLOCK, GROUP)
        else:
            values = tl.load(noisy + offset, mask=here, other=float("-inf"))
            best = tl.max(values, 0)
            token = tl.min(tl.load(noisy_ids + offset, mask=here & (values == best), other=LAST), 0)
            if TOP_P:
                block = tl.arange(0, BLOCKS)
                inside = block < blocks
                weights = tl.load(sums + row * blocks + block, mask=inside, other=0.0)
                block_largest = tl.load(maxima + block, mask=inside, other=float("-inf"))
                total = tl.sum(weights * tl.exp((block_largest - largest) * cool), 0)
        if min_share > 0:
            min_key = tl.maximum(min_key, key_of(largest + heat * tl.log(min_share)))
        key = key_of(tl.load(logits + token))
        done = (key >= min_key) & (share >= 1)
        while not done:
            # The token passes top_k and min_p. For top_p the kernel sums the probabilities of the tokens above it.
            candidate = key >= min_key
            min_key = tl.where(candidate, key + 1, min_key)
            count = _list(maxima, listed, blocks, min_key, BLOCKS)
            above = _weight(logits, vocab, cool, largest, listed, count, min_key, BLOCK, GROUP)
            accepted = candidate & ((above < share * total) | (key == largest_key))
            done = accepted | (share >= 1)
            if not accepted:
                token = _winner(logits, vocab, cool, largest, noise_key, listed, count, min_key, BLOCK, GROUP)
                key = key_of(tl.load(logits + token))
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _list(maxima, listed, blocks, min_key, BLOCKS: tl.constexpr):
    """Write to `listed` the blocks that have a token with a logit key of at least `min_key`; return their number."""
    block = tl.arange(0, BLOCKS)
    chosen = (key_of(tl.load(maxima + block, mask=block < blocks, other=float("-inf"))) >= min_key) & (block < blocks)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(listed + place, block, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _weight(logits, vocab, cool, largest, listed, count, min_key, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The sum of exp((logit - largest) * cool) over all tokens in the listed blocks with a logit key >= `min_key`."""
    weight = tl.zeros((GROUP, BLOCK), tl.float32)
    for start in range(0, count, GROUP):
        _, x, here = _group(logits, vocab, listed, count, start, BLOCK, GROUP)
        weight += tl.where(here & (key_of(x) >= min_key), tl.exp((x - largest) * cool), 0.0)
    return tl.sum(tl.sum(weight, 1), 0)


@triton.jit
def _winner(logits, vocab, cool, largest, noise_key, listed, count, min_key, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The token with the largest logit + noise of all tokens in the listed blocks with a logit key >= `min_key`."""
    best = tl.full((GROUP, BLOCK), float("inf"), tl.float32)
    best_token = tl.full((GROUP, BLOCK), LAST, tl.int32)
    for start in range(0, count, GROUP):
        tokens, x, here = _group(logits, vocab, listed, count, start, BLOCK, GROUP)
        score = exponential(noise_key, tokens) * tl.exp((largest - x) * cool)
        better = here & (key_of(x) >= min_key) & (score < best)  # of equal scores the smallest token id wins
        best = tl.where(better, score, best)
        best_token = tl.where(better, tokens, best_token)
    smallest = tl.min(tl.min(best, 1), 0)
    return tl.min(tl.min(tl.where(best == smallest, best_token, LAST), 1), 0)


@triton.jit
def _group(logits, vocab, listed, count, start, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(tokens, logits, mask of the tokens that exist), each [GROUP, BLOCK], of GROUP listed blocks from index `start`
    on."""
    place = start + tl.arange(0, GROUP)
    block = tl.load(listed + place, mask=place < count, other=0)
    tokens = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = (place < count)[:, None] & (tokens < vocab)
    return tokens, tl.load(logits + tokens, mask=here, other=float("-inf")), here


@triton.jit
def _count(logits, vocab, listed, count, min_key, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The number of tokens in the listed blocks with a logit key of at least `min_key`."""
    counts = tl.zeros((GROUP, BLOCK), tl.int32)
    for start in range(0, count, GROUP):
        _, x, here = _group(logits, vocab, listed, count, start, BLOCK, GROUP)
        counts += (here & (key_of(x) >= min_key)).to(tl.int32)
    return tl.sum(tl.sum(counts, 1), 0)


@triton.jit
def _kth_key(
    logits, vocab, maxima, listed, blocks, k, largest_key,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A threshold of logit keys. The tokens with at least this key are those with the k largest logits, and tokens with
    a logit equal to the k-th largest.

    k is 1 to vocab - 1.
    """
    block = tl.arange(0, BLOCKS)
    keys = key_of(tl.load(maxima + block, mask=block < blocks, other=float("-inf")))
    # At least k tokens have a logit key >= `low`; fewer than k tokens have a logit key >= `high`.
    low = tl.full((), LOWEST, tl.int64)
    high = largest_key.to(tl.int64) + 1
    if k <= blocks:
        passing = tl.full((), BLOCKS, tl.int32)
        while (high - low > 1) & (passing != k):
            middle = (low + high) >> 1
            more = tl.sum((keys >= middle).to(tl.int32), 0)
            low, high = tl.where(more >= k, middle, low), tl.where(more >= k, high, middle)
            passing = tl.where(more >= k, more, passing)
    high = largest_key.to(tl.int64) + 1
    count = _list(maxima, listed, blocks, low, BLOCKS)
    passing = _count(logits, vocab, listed, count, low, BLOCK, GROUP)
    while (high - low > 1) & (passing != k):
        middle = (low + high) >> 1
        more = _count(logits, vocab, listed, count, middle, BLOCK, GROUP)
        low, high = tl.where(more >= k, middle, low), tl.where(more >= k, high, middle)
        passing = tl.where(more >= k, more, passing)
    return low.to(tl.int32)
