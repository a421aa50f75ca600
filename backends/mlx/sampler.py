"""From logits to tokens in MLX. engine/sampling.py says what each step means and judges this file."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import AnswerSampling, Batch

GOLDEN = 0x9E3779B9
OUT = float("-inf")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each answer, and log-probabilities where any row asked for them."""

    tokens: mx.array  # [answers] uint32
    chosen: mx.array | None = None  # [answers] float32
    top_tokens: mx.array | None = None  # [answers, k] int32, likeliest first
    top: mx.array | None = None  # [answers, k] float32

    @property
    def logprobs(self) -> tuple[mx.array | None, ...]:
        """As StepResult has them."""
        return self.chosen, self.top_tokens, self.top

    @property
    def arrays(self) -> list[mx.array]:
        return [x for x in (self.tokens, *self.logprobs) if x is not None]


def sample(logits: mx.array, batch: Batch) -> Drawn:
    """logits [answers, vocab], of any float dtype."""
    rows = batch.sampling
    heated = bool((rows.temperature > 0).any())
    most = int(rows.logprobs.max(initial=-1))
    changed = any(len(of) for of in (rows.bias_answers, rows.history_answers, batch.mask_answers))
    if not heated and not changed and most < 0:
        return Drawn(mx.argmax(logits, axis=-1))
    logits = logits.astype(mx.float32)
    x = _adjusted(logits, batch)
    tokens = _draw(x, rows) if heated else mx.argmax(x, axis=-1)
    if most < 0:
        return Drawn(tokens)
    every = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(every, tokens[:, None], axis=-1)[:, 0]
    return Drawn(tokens, chosen, *_likeliest(every, most))


def _adjusted(x: mx.array, batch: Batch) -> mx.array:
    """Bias, penalties, allowed tokens."""
    rows = batch.sampling
    x = mx.array(x)  # assignments below change this one, not the raw logits
    if len(rows.bias_answers):
        owners, tokens, values = map(mx.array, (rows.bias_answers, rows.bias_tokens, rows.bias_values))
        x = x.at[owners, tokens].add(values)
    if len(rows.history_answers):
        columns = rows.history_tokens, rows.history_prompt, rows.history_output
        owners, tokens, in_prompt, in_output = map(mx.array, (rows.history_answers, *columns))
        repetition, presence, frequency = (
            mx.array(penalty)[owners]
            for penalty in (rows.repetition_penalty, rows.presence_penalty, rows.frequency_penalty)
        )
        held = x[owners, tokens]
        said = mx.where(held > 0, held / repetition, held * repetition)
        held = mx.where((in_prompt > 0) | (in_output > 0), said, held)
        x[owners, tokens] = held - frequency * in_output - presence * (in_output > 0)
    if len(batch.mask_answers):
        owners, words = mx.array(batch.mask_answers), mx.array(batch.masks)
        bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(len(owners), -1)[:, : x.shape[1]] == 1
        x[owners] = mx.where(allowed, x[owners], OUT)
    return x


def _draw(x: mx.array, rows: AnswerSampling) -> mx.array:
    heated = rows.temperature > 0
    x = x / mx.array(np.where(heated, rows.temperature, np.float32(1)))[:, None]
    top_k = np.where(heated, rows.top_k, 0)
    top_p = np.where(heated, rows.top_p, np.float32(1))
    min_p = np.where(heated, rows.min_p, np.float32(0))
    if (top_k > 0).any() or (top_p < 1).any():
        x = _filtered(x, top_k, top_p)
    if (min_p > 0).any():
        least = mx.max(x, axis=-1) + mx.log(mx.array(min_p))  # -inf where it is off
        x = mx.where(x < least[:, None], OUT, x)
    noise = mx.where(mx.array(heated)[:, None], gumbel(rows.seed, rows.draw, x.shape[1]), 0.0)
    return mx.argmax(x + noise, axis=-1)


def _filtered(x: mx.array, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> mx.array:
    """What top_k leaves, and of that what top_p leaves; ties of the last value stay."""
    vocab = x.shape[1]
    limited, nucleus = top_k > 0, top_p < 1
    # A row with a nucleus and no top_k may need every value in order; all others their own top_k at most.
    most = vocab if (nucleus & ~limited).any() else min(vocab, int(top_k.max()))
    largest = mx.sort(x if most == vocab else mx.topk(x, most, axis=-1), axis=-1)[:, ::-1]  # descending
    if limited.any():
        last = mx.take_along_axis(largest, mx.array(np.clip(top_k - 1, 0, most - 1))[:, None], axis=-1)
        x = mx.where((x < last) & mx.array(limited)[:, None], OUT, x)
    if nucleus.any():
        p = mx.exp(largest - mx.logsumexp(x, axis=-1, keepdims=True))
        kept = (mx.cumsum(p, axis=-1) - p < mx.array(top_p)[:, None]).sum(axis=-1, keepdims=True)
        last = mx.take_along_axis(largest, mx.maximum(kept - 1, 0).astype(mx.int32), axis=-1)
        x = mx.where((x < last) & mx.array(nucleus)[:, None], OUT, x)
    return x


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[np.int32], vocab: int) -> mx.array:
    """[rows, vocab] float32: the noise that engine/sampling.py defines."""
    key = mx.zeros(len(seeds), mx.uint32)
    for word in (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32), positions):
        key = _mix((key ^ mx.array(word.astype(np.uint32))) + mx.array(GOLDEN, mx.uint32))
    h = _mix((key[:, None] ^ mx.arange(vocab, dtype=mx.uint32)) + mx.array(GOLDEN, mx.uint32))
    return -mx.log(-mx.log(((h >> 8) | 1).astype(mx.float32) / 2**24))


def _mix(h: mx.array) -> mx.array:
    """murmur3's finaliser."""
    h = h ^ (h >> 16)
    h = h * mx.array(0x85EBCA6B, mx.uint32)
    h = h ^ (h >> 13)
    h = h * mx.array(0xC2B2AE35, mx.uint32)
    return h ^ (h >> 16)


def _likeliest(every: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(ids, values) [rows, count], the smallest id first among equals: a sort would leave their order open."""
    ids: list[mx.array] = []
    values: list[mx.array] = []
    tokens = mx.arange(every.shape[1])
    for _ in range(min(count, every.shape[1])):
        best = mx.argmax(every, axis=-1, keepdims=True)
        ids.append(best)
        values.append(mx.take_along_axis(every, best, axis=-1))
        every = mx.where(tokens == best, OUT, every)
    if not ids:
        return mx.zeros((len(every), 0), mx.int32), mx.zeros((len(every), 0), mx.float32)
    return mx.concatenate(ids, axis=-1).astype(mx.int32), mx.concatenate(values, axis=-1)
