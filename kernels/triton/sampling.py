"""Sampling on GPUs, without sorting the vocabulary and without synchronising with the host.

kernels/ops/sampling.py defines the ops; draw.py has the draw. The kernels skip entries with a negative row index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import sampling as reference
from ..ops.sampling import Logprobs
from .draw import LOWEST, draw
from .noise import LAST, key_of

__all__ = ["bias", "carry", "draw", "greedy", "logprobs", "mask", "penalise"]

BLOCK = 128  # tokens of a block; logprobs stores the key (noise.key_of) of each block's largest logit
CHUNK = 16  # blocks that a program of logprobs reads
SPAN = 4096  # tokens that a program of mask or greedy computes
ENTRIES = 256  # rows (carry) or entries (bias, penalise) that a program computes

# These arguments have any address and any length. If Triton specialised on their alignment or on the length, it would
# compile another kernel at run time, which takes a second or more.
_LISTS = ["rows", "tokens", "values", "in_prompt", "in_output", "repetition", "presence", "frequency", "words"]
_STEPS = ["tokens", "ends", "carried", "drawn"]
_CHUNK_RESULTS = ["keys", "ids"]


def carry(tokens: Tensor, ends: Tensor, carried: Tensor, drawn: Tensor) -> None:
    rows = len(ends)
    if rows:
        _carry[(triton.cdiv(rows, ENTRIES),)](tokens, ends, carried, drawn, rows, ENTRIES=ENTRIES)


def bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Several values for the same token are added in any order."""
    if not _covered(logits):
        reference.bias(logits, rows, tokens, values)
    elif len(rows):
        count = len(rows)
        _bias[(triton.cdiv(count, ENTRIES),)](
            logits, logits.stride(0), rows, tokens, values.contiguous(), count, ENTRIES=ENTRIES
        )


def penalise(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    in_prompt: Tensor,
    in_output: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    if not _covered(logits):
        reference.penalise(logits, rows, tokens, in_prompt, in_output, repetition, presence, frequency)
    elif len(rows):
        entries = rows, tokens, in_prompt, in_output
        _penalise[(triton.cdiv(len(rows), ENTRIES),)](
            logits, logits.stride(0), *entries, repetition, presence, frequency, len(rows), ENTRIES=ENTRIES
        )


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    if not _covered(logits):
        reference.mask(logits, rows, words)
    elif len(rows):
        vocab = logits.shape[1]
        _mask[(triton.cdiv(vocab, SPAN), len(rows))](
            logits, logits.stride(0), vocab, rows, words.contiguous(), words.shape[1], SPAN=SPAN
        )


def greedy(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        return reference.greedy(logits)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunks = triton.cdiv(vocab, SPAN)
    if rows:
        chunk_results = torch.empty(2, rows, chunks, dtype=torch.int32, device=logits.device)
        _largest[(chunks, rows)](logits, logits.stride(0), vocab, *chunk_results, SPAN=SPAN)
        _larger[(rows,)](tokens, *chunk_results, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return tokens


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    if logits.dtype != torch.float32:
        return reference.logprobs(logits, tokens, k)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    k = min(k, vocab)
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    top_tokens = torch.empty(rows, k, dtype=torch.int64, device=logits.device)
    if rows:
        chunks = triton.cdiv(vocab, CHUNK * BLOCK)
        keys, sums = torch.empty(2, rows, chunks * CHUNK, dtype=torch.int32, device=logits.device)
        sums = sums.view(torch.float32)
        _add_up[(chunks, rows)](logits, logits.stride(0), vocab, keys, sums, CHUNK=CHUNK, BLOCK=BLOCK)
        _likeliest[(rows,)](
            chosen, top_tokens, top, logits, logits.stride(0), vocab, tokens, keys, sums, chunks * CHUNK, k,
            BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(chunks * CHUNK), num_warps=4,
        )  # fmt: skip
    return Logprobs(chosen, top_tokens, top)


def _covered(logits: Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.stride(1) == 1


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=_STEPS)
def _carry(tokens, ends, carried, drawn, rows, ENTRIES: tl.constexpr):
    row = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    source = tl.load(carried + row, mask=row < rows, other=-1)
    end = tl.load(ends + row, mask=row < rows, other=0)
    tl.store(tokens + end, tl.load(drawn + source, mask=source >= 0), mask=source >= 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_LISTS)
def _bias(logits, stride, rows, tokens, values, count, ENTRIES: tl.constexpr):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(rows + entry, mask=entry < count, other=-1).to(tl.int64)
    token = tl.load(tokens + entry, mask=row >= 0, other=0)
    value = tl.load(values + entry, mask=row >= 0, other=0.0).to(tl.float32)
    tl.atomic_add(logits + row * stride + token, value, mask=row >= 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_LISTS)
def _penalise(
    logits, stride, rows, tokens, in_prompt, in_output, repetition, presence, frequency, count, ENTRIES: tl.constexpr
):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    row = tl.load(rows + entry, mask=entry < count, other=-1).to(tl.int64)
    here = row >= 0
    offset = row * stride + tl.load(tokens + entry, mask=here, other=0)
    prompt = tl.load(in_prompt + entry, mask=here, other=0)
    output = tl.load(in_output + entry, mask=here, other=0)
    x = tl.load(logits + offset, mask=here, other=0.0)
    penalty = tl.load(repetition + row, mask=here, other=1.0)
    x = tl.where((prompt > 0) | (output > 0), tl.where(x > 0, x / penalty, x * penalty), x)
    x -= tl.load(frequency + row, mask=here, other=0.0) * output.to(tl.float32)
    x -= tl.where(output > 0, tl.load(presence + row, mask=here, other=0.0), 0.0)
    tl.store(logits + offset, x, mask=here)


@triton.jit(do_not_specialize_on_alignment=_LISTS)
def _mask(logits, stride, vocab, rows, words, words_per_row, SPAN: tl.constexpr):
    """Program (chunk, entry) masks SPAN tokens of the row `rows[entry]`."""
    entry = tl.program_id(1)
    row = tl.load(rows + entry).to(tl.int64)
    token = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    word = tl.load(words + entry.to(tl.int64) * words_per_row + token // 32, mask=token < vocab, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    nothing = tl.full((SPAN,), float("-inf"), tl.float32)
    tl.store(logits + row * stride + token, nothing, mask=forbidden & (token < vocab) & (row >= 0))


@triton.jit(do_not_specialize_on_alignment=_CHUNK_RESULTS)
def _largest(logits, stride, vocab, keys, ids, SPAN: tl.constexpr):
    """Program (chunk, row): the largest logit key (noise.key_of) of the chunk, and the smallest token with this key."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    tokens = chunk * SPAN + tl.arange(0, SPAN)
    key = key_of(tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < vocab, other=float("-inf")))
    largest = tl.max(key, 0)
    offset = row * tl.num_programs(0) + chunk
    tl.store(keys + offset, largest)
    tl.store(ids + offset, tl.min(tl.where(key == largest, tokens, LAST), 0))


@triton.jit(do_not_specialize_on_alignment=_CHUNK_RESULTS)
def _larger(out, keys, ids, chunks, CHUNKS: tl.constexpr):
    """Program `row`: from the results of the chunks, the smallest token with the row's largest logit key."""
    row = tl.program_id(0)
    here = tl.arange(0, CHUNKS) < chunks
    offset = row * chunks + tl.arange(0, CHUNKS)
    key = tl.load(keys + offset, mask=here, other=LOWEST)
    token = tl.load(ids + offset, mask=here, other=LAST)
    tl.store(out + row, tl.min(tl.where(key == tl.max(key, 0), token, LAST), 0).to(tl.int64))


@triton.jit
def _add_up(logits, stride, vocab, keys, sums, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Program (chunk, row): the largest logit key (noise.key_of) and the log-sum-exp of the logits of each block."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    blocks = chunk * CHUNK + tl.arange(0, CHUNK)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=tokens < vocab, other=float("-inf"))
    offset = row * tl.num_programs(0) * CHUNK + blocks
    tl.store(keys + offset, tl.max(tl.where(tokens < vocab, key_of(x), LOWEST), 1))
    largest = tl.max(x, 1)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(sums + offset, base + tl.log(tl.sum(tl.exp(x - base[:, None]), 1)))


@triton.jit(do_not_specialize=["k"])
def _likeliest(
    chosen, top_tokens, top, logits, stride, vocab, tokens, keys, sums, blocks, k,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program `row`: the log-probabilities of the row's token and of its k likeliest tokens.

    It finds the likeliest tokens one by one. `left` has, for each block, the largest logit key of the tokens that are
    not listed yet. The next token is in the first block with the largest of these keys.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    block = tl.arange(0, BLOCKS)
    parts = tl.load(sums + row * blocks + block, mask=block < blocks, other=float("-inf"))
    base = tl.max(parts, 0)
    normaliser = base + tl.log(tl.sum(tl.exp(parts - base), 0))
    tl.store(chosen + row, tl.load(logits + tl.load(tokens + row)) - normaliser)
    left = tl.load(keys + row * blocks + block, mask=block < blocks, other=LOWEST)
    last_key = tl.full((), LAST, tl.int32)
    last = tl.full((), -1, tl.int32)
    for place in range(k):
        key = tl.max(left, 0)
        first = tl.min(tl.where(left == key, block, BLOCKS), 0)
        ids = first * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        block_keys = key_of(x)
        unlisted = (ids < vocab) & ((block_keys < last_key) | ((block_keys == last_key) & (ids > last)))
        token = tl.min(tl.where(unlisted & (block_keys == key), ids, LAST), 0)
        tl.store(top_tokens + row * k + place, token.to(tl.int64))
        tl.store(top + row * k + place, tl.load(logits + token) - normaliser)
        next_key = tl.max(tl.where(unlisted & (ids != token), block_keys, LOWEST), 0)
        left = tl.where(block == first, next_key, left)
        last_key = key
        last = token
