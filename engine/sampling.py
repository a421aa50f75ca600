"""Sampling in numpy: the reference for the sampler of every backend.

A backend must do the same steps in the same order, sample by sample, in float32 or better. If two candidates are
closer than its rounding error, it may choose either. `candidates` does steps 1–7, `draw` does step 8:

    1 logit_bias          x[t] += bias
    2 repetition penalty  t in prompt or output: x[t] = x[t] / r if x[t] > 0 else x[t] * r
    3 frequency, presence t in output, n times:  x[t] -= frequency * n + presence
    4 allowed-token mask  x[t] = -inf where the bit of t is 0
      temperature 0: the token is argmax x (the smallest id among equals) and the rest is skipped
    5 temperature         x /= temperature
    6 top_k               keep t if x[t] >= the k-th largest x (keeps ties)
      top_p               p = softmax(x) over the rest; keep t if the p of all strictly larger x sum to
                          < top_p: the smallest set that reaches top_p (keeps ties)
    7 min_p               keep t if p[t] >= min_p * max p, that is x[t] >= max x + ln(min_p)
    8 draw                the token is argmax (x[t] + g[t]), a Gumbel-max draw (the smallest id among equals)

The noise g depends only on (seed, draw position, token id). So a request gets the same tokens with any batch, any
chunking and any backend. All integers are unsigned 32-bit and wrap:

    mix(h):  h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16     (murmur3 fmix32)
    k = mix(low 32 bits of seed + 0x9E3779B9)
    k = mix((k ^ high 32 bits of seed) + 0x9E3779B9)
    k = mix((k ^ draw position) + 0x9E3779B9)                                                    (one per sample)
    h = mix((k ^ token id) + 0x9E3779B9)                                                         (one per token)
    u = ((h >> 8) | 1) / 2**24      24 bits, odd: exact in float32, never 0 and never 1
    g = -ln(-ln(u))

Log-probabilities are log_softmax of the raw logits, before step 1. Among equal ones the smallest id comes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, Ints, SampleSettings, Want
from .grammar import unpack_mask
from .runner import StepResult

Floats = NDArray[np.float64]

GOLDEN = np.uint32(0x9E3779B9)


def mix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The 32-bit finaliser of murmur3: each input bit flips each output bit with a probability of about 1/2."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def draw_key(seed: int, position: int) -> NDArray[np.uint32]:
    """[1] the key of one draw, which selects its random numbers."""
    key = np.zeros(1, np.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32, position):
        key = mix((key ^ np.uint32(word)) + GOLDEN)
    return key


def uniform(seed: int, position: int, vocab_size: int) -> Floats:
    """[vocab_size] float64 in (0, 1), one per token id, determined by seed and draw position."""
    h = mix((draw_key(seed, position) ^ np.arange(vocab_size, dtype=np.uint32)) + GOLDEN)
    return ((h >> np.uint32(8)) | np.uint32(1)).astype(np.float64) / 2**24


def gumbel(seed: int, position: int, vocab_size: int) -> Floats:
    """[vocab_size] standard Gumbel noise of one draw."""
    noise: Floats = -np.log(-np.log(uniform(seed, position, vocab_size)))
    return noise


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def candidates(
    logits: NDArray[np.float32], sampling: SampleSettings, index: int, mask: NDArray[np.bool_] | None
) -> Floats:
    """[vocab] float64 scores of the tokens for `index`; -inf: excluded. `mask` is [vocab] bool of the allowed tokens.

    Raises ValueError if the mask allows no token.
    """
    x = logits.astype(np.float64)
    biases = _of_sample(index, sampling.bias_samples, sampling.bias_tokens, sampling.bias_values)
    for token, value in zip(*biases, strict=True):
        x[token] += value
    _penalise(x, sampling, index)
    if mask is not None:
        if not mask.any():
            raise ValueError(f"the mask of sample {index} allows no token at all")
        x[~mask] = -np.inf
    if sampling.temperature[index] == 0.0:
        return x
    x /= float(sampling.temperature[index])
    if 0 < sampling.top_k[index] < len(x):
        x[x < np.sort(x)[-sampling.top_k[index]]] = -np.inf
    if sampling.top_p[index] < 1.0:
        values, ranks = np.unique(-x, return_inverse=True)  # descending x; equal values have one rank
        mass = np.bincount(ranks, weights=np.exp(log_softmax(x)), minlength=len(values))
        larger = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
        x[larger[ranks] >= float(sampling.top_p[index])] = -np.inf
    if sampling.min_p[index] > 0.0:
        x[x < x.max() + np.log(float(sampling.min_p[index]))] = -np.inf
    return x


def _penalise(x: Floats, sampling: SampleSettings, index: int) -> None:
    tokens, in_prompt, in_output = _of_sample(
        index, sampling.history_samples, sampling.history_tokens, sampling.history_prompt, sampling.history_output
    )
    penalty = float(sampling.repetition_penalty[index])
    used = tokens[(in_prompt > 0) | (in_output > 0)]
    x[used] = np.where(x[used] > 0, x[used] / penalty, x[used] * penalty)
    x[tokens] -= float(sampling.frequency_penalty[index]) * in_output
    x[tokens] -= float(sampling.presence_penalty[index]) * (in_output > 0)


def draw(x: Floats, sampling: SampleSettings, index: int) -> int:
    """The token that `index` draws from its candidates."""
    if sampling.temperature[index] == 0.0:
        return int(x.argmax())
    return int((x + gumbel(int(sampling.seed[index]), int(sampling.draw[index]), len(x))).argmax())


def sample(logits: NDArray[np.float32], batch: Batch) -> StepResult:
    """The result that a runner must give for `batch` when the logits of its samples are `logits` [samples, vocab]."""
    sampling = batch.sampling
    masks = dict(zip(batch.mask_samples.tolist(), unpack_mask(batch.masks, logits.shape[1]), strict=True))
    wants = np.repeat(batch.wants, np.diff(batch.sample_starts))
    drawn = np.zeros(len(logits), np.int32)
    for index in np.flatnonzero(wants == Want.TOKEN).tolist():
        drawn[index] = draw(candidates(logits[index], sampling, index, masks.get(index)), sampling, index)
    returned, row_starts = verify(batch, drawn)
    tokens = drawn[returned]
    listed = int(sampling.logprobs.max(initial=-1))
    if listed < 0:
        return StepResult(tokens, row_starts)
    logprobs = log_softmax(logits[returned].astype(np.float64))
    top = np.argsort(-logprobs, axis=-1, kind="stable")[:, :listed]
    return StepResult(
        tokens,
        row_starts,
        logprobs=np.take_along_axis(logprobs, tokens[:, None], -1)[:, 0].astype(np.float32),
        top_tokens=top.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, top, -1).astype(np.float32),
    )


def verify(batch: Batch, drawn: Ints) -> tuple[NDArray[np.bool_], Ints]:
    """Compare the drawn tokens [samples] with the drafts. Returns (whether each sample has a result [samples] bool,
    StepResult.row_starts [rows + 1]).

    A row returns its tokens up to and including the first that differs from the draft at its position.
    """
    starts = batch.sample_starts
    returned = np.ones(len(drawn), np.bool_)
    for row in np.flatnonzero(batch.drafts).tolist():
        last = batch.row_starts[row + 1]
        drafts = batch.tokens[last - batch.drafts[row] : last]
        wrong = np.flatnonzero(drawn[starts[row] : starts[row + 1] - 1] != drafts)
        if len(wrong):
            returned[starts[row] + wrong[0] + 1 : starts[row + 1]] = False
    row_starts = np.concatenate(([0], np.cumsum(returned)))[starts].astype(np.int32)
    return returned, row_starts


def _of_sample(index: int, samples: Ints, *columns: NDArray[Any]) -> list[NDArray[Any]]:
    chosen = samples == index
    return [column[chosen] for column in columns]
