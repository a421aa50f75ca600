"""Draws tokens from logits in MLX, as engine/sampling.py defines it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, SampleSettings

GOLDEN = 0x9E3779B9
EXCLUDED = float("-inf")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each sample (see Batch), and log-probabilities if a row asks for them."""

    tokens: mx.array  # [samples] uint32
    chosen: mx.array | None = None  # [samples] float32
    top_tokens: mx.array | None = None  # [samples, k] int32, likeliest first
    top: mx.array | None = None  # [samples, k] float32

    @property
    def logprobs(self) -> tuple[mx.array | None, ...]:
        """The three arrays of log-probabilities, in the order of the fields of StepResult."""
        return self.chosen, self.top_tokens, self.top

    @property
    def arrays(self) -> list[mx.array]:
        return [x for x in (self.tokens, *self.logprobs) if x is not None]


def sample(logits: mx.array, batch: Batch) -> Drawn:
    """Draw one token for each sample of the batch. `logits`: [samples, vocab], of any float dtype."""
    sampling = batch.sampling
    greedy = not (sampling.temperature > 0).any()
    num_listed = int(sampling.logprobs.max(initial=-1))
    adjustments = len(sampling.bias_samples) + len(sampling.history_samples) + len(batch.mask_samples)
    if greedy and not adjustments and num_listed < 0:
        return Drawn(mx.argmax(logits, axis=-1))
    logits = logits.astype(mx.float32)
    x = _adjusted(logits, batch)
    tokens = mx.argmax(x, axis=-1) if greedy else _draw(x, sampling)
    if num_listed < 0:
        return Drawn(tokens)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Drawn(tokens, chosen, *_likeliest(logprobs, num_listed))


def _adjusted(logits: mx.array, batch: Batch) -> mx.array:
    """A copy of the logits after logit_bias, penalties and the masks of allowed tokens."""
    sampling = batch.sampling
    x = mx.array(logits)
    if len(sampling.bias_samples):
        indices = mx.array(sampling.bias_samples), mx.array(sampling.bias_tokens)
        x = x.at[indices].add(mx.array(sampling.bias_values))
    if len(sampling.history_samples):
        x = _penalised(x, sampling)
    if len(batch.mask_samples):
        samples = mx.array(batch.mask_samples)
        bits = (mx.array(batch.masks)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(len(samples), -1)[:, : x.shape[1]] == 1
        x[samples] = mx.where(allowed, x[samples], EXCLUDED)
    return x


def _penalised(x: mx.array, sampling: SampleSettings) -> mx.array:
    samples = mx.array(sampling.history_samples)
    tokens = mx.array(sampling.history_tokens)
    in_output = mx.array(sampling.history_output)
    repeated = (mx.array(sampling.history_prompt) > 0) | (in_output > 0)
    repetition = mx.array(sampling.repetition_penalty)[samples]
    presence = mx.array(sampling.presence_penalty)[samples]
    frequency = mx.array(sampling.frequency_penalty)[samples]
    values = x[samples, tokens]
    values = mx.where(repeated, mx.where(values > 0, values / repetition, values * repetition), values)
    x[samples, tokens] = values - frequency * in_output - presence * (in_output > 0)
    return x


def _draw(x: mx.array, sampling: SampleSettings) -> mx.array:
    random = sampling.temperature > 0
    x = x / mx.array(np.where(random, sampling.temperature, np.float32(1)))[:, None]
    top_k = np.where(random, sampling.top_k, 0)
    top_p = np.where(random, sampling.top_p, np.float32(1))
    min_p = np.where(random, sampling.min_p, np.float32(0))
    if (top_k > 0).any() or (top_p < 1).any():
        x = _filtered(x, top_k, top_p)
    if (min_p > 0).any():
        threshold = mx.max(x, axis=-1) + mx.log(mx.array(min_p))  # -inf for a row without min_p
        x = mx.where(x < threshold[:, None], EXCLUDED, x)
    noise = mx.where(mx.array(random)[:, None], gumbel(sampling.seed, sampling.draw, x.shape[1]), 0.0)
    return mx.argmax(x + noise, axis=-1)


def _filtered(x: mx.array, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> mx.array:
    """The logits after top_k and then top_p: the tokens outside are excluded. A token whose logit equals that of the
    last token inside stays."""
    vocab = x.shape[1]
    limited = top_k > 0
    nucleus = top_p < 1
    # A row with top_p and without top_k may need all logits in order; any other row needs at most top_k logits.
    count = vocab if (nucleus & ~limited).any() else min(vocab, int(top_k.max()))
    largest = mx.sort(x if count == vocab else mx.topk(x, count, axis=-1), axis=-1)[:, ::-1]  # descending
    if limited.any():
        last = mx.take_along_axis(largest, mx.array(np.clip(top_k - 1, 0, count - 1))[:, None], axis=-1)
        x = mx.where((x < last) & mx.array(limited)[:, None], EXCLUDED, x)
    if nucleus.any():
        p = mx.exp(largest - mx.logsumexp(x, axis=-1, keepdims=True))
        inside = (mx.cumsum(p, axis=-1) - p < mx.array(top_p)[:, None]).sum(axis=-1, keepdims=True)
        last = mx.take_along_axis(largest, mx.maximum(inside - 1, 0).astype(mx.int32), axis=-1)
        x = mx.where((x < last) & mx.array(nucleus)[:, None], EXCLUDED, x)
    return x


def gumbel(seeds: NDArray[np.uint64], positions: NDArray[np.int32], vocab: int) -> mx.array:
    """[samples, vocab] float32: the noise that engine/sampling.py defines."""
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


def _likeliest(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """(ids, values), each [samples, count], the largest value first. Among equal values the smallest id comes first;
    MLX's sort does not define their order."""
    ids: list[mx.array] = []
    values: list[mx.array] = []
    tokens = mx.arange(logprobs.shape[1])
    for _ in range(min(count, logprobs.shape[1])):
        best = mx.argmax(logprobs, axis=-1, keepdims=True)
        ids.append(best)
        values.append(mx.take_along_axis(logprobs, best, axis=-1))
        logprobs = mx.where(tokens == best, EXCLUDED, logprobs)
    if not ids:
        return mx.zeros((len(logprobs), 0), mx.int32), mx.zeros((len(logprobs), 0), mx.float32)
    return mx.concatenate(ids, axis=-1).astype(mx.int32), mx.concatenate(values, axis=-1)
