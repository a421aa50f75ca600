"""How a token is drawn: the numpy oracle that judges every backend's sampler.

A backend must do the same steps in the same order, row by row, on float32 or better; where two candidates lie
closer than its rounding it may choose the other one. The steps (`candidates` does 1–7, `draw` does 8):

    1 logit_bias          x[t] += bias
    2 repetition penalty  t in prompt or output: x[t] = x[t] / r if x[t] > 0 else x[t] * r
    3 frequency, presence t in output, n times:  x[t] -= frequency * n + presence
    4 allowed-token mask  x[t] = -inf where the bit of t is 0
      temperature 0: the token is argmax x (the smallest id among equals) and the rest is skipped
    5 temperature         x /= temperature
    6 top_k               keep t if x[t] >= the k-th largest x: ties of the k-th value stay
      top_p               p = softmax(x) over what is left; keep t if the p of all strictly larger x sum to
                          < top_p: the smallest set reaching top_p, and ties of its last value stay
    7 min_p               keep t if p[t] >= min_p * max p, that is x[t] >= max x + ln(min_p)
    8 draw                the token is argmax (x[t] + g[t]), a Gumbel-max draw (the smallest id among equals)

The noise g depends on (seed, draw position, token id) only, so a request draws the same tokens whoever shares its
batch, however its prompt was chunked, on every backend. All integers are unsigned 32-bit and wrap:

    mix(h):  h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16     (murmur3 fmix32)
    k = mix(low 32 bits of seed + 0x9E3779B9)
    k = mix((k ^ high 32 bits of seed) + 0x9E3779B9)
    k = mix((k ^ draw position) + 0x9E3779B9)                                                    (one per row)
    h = mix((k ^ token id) + 0x9E3779B9)                                                         (one per token)
    u = ((h >> 8) | 1) / 2**24      24 bits, odd: exact in float32, never 0 and never 1
    g = -ln(-ln(u))

Log-probabilities are log_softmax of the raw logits, before step 1; the likeliest are listed with the smallest id
first among equals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, Ints, SamplingRows, Want
from .grammar import unpack_mask
from .runner import StepResult

Floats = NDArray[np.float64]

GOLDEN = np.uint32(0x9E3779B9)


def mix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """murmur3's 32-bit finaliser: every input bit flips every output bit with probability about one half."""
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x85EBCA6B)
    h = h ^ (h >> np.uint32(13))
    h = h * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def uniform(seed: int, position: int, vocab_size: int) -> Floats:
    """[vocab_size] numbers in (0, 1), one for each token id, fixed by seed and draw position."""
    key = np.zeros(1, np.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32, position):
        key = mix((key ^ np.uint32(word)) + GOLDEN)
    h = mix((key ^ np.arange(vocab_size, dtype=np.uint32)) + GOLDEN)
    return ((h >> np.uint32(8)) | np.uint32(1)).astype(np.float64) / 2**24


def gumbel(seed: int, position: int, vocab_size: int) -> Floats:
    """[vocab_size] standard Gumbel noise of one draw."""
    noise: Floats = -np.log(-np.log(uniform(seed, position, vocab_size)))
    return noise


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def candidates(logits: NDArray[np.float32], rows: SamplingRows, row: int, mask: NDArray[np.bool_] | None) -> Floats:
    """[vocab] values among which `row` draws, -inf where a token is out; `mask` is [vocab] of allowed tokens.

    Raises ValueError if the mask allows nothing.
    """
    x = logits.astype(np.float64)
    for token, value in zip(*_of_row(row, rows.bias_rows, rows.bias_tokens, rows.bias_values), strict=True):
        x[token] += value
    tokens, in_prompt, in_output = _of_row(
        row, rows.history_rows, rows.history_tokens, rows.history_prompt, rows.history_output
    )
    penalty = float(rows.repetition_penalty[row])
    seen = tokens[(in_prompt > 0) | (in_output > 0)]
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    x[tokens] -= float(rows.frequency_penalty[row]) * in_output
    x[tokens] -= float(rows.presence_penalty[row]) * (in_output > 0)
    if mask is not None:
        if not mask.any():
            raise ValueError(f"the mask of row {row} allows no token at all")
        x[~mask] = -np.inf
    if rows.temperature[row] == 0.0:
        return x
    x /= float(rows.temperature[row])
    if 0 < rows.top_k[row] < len(x):
        x[x < np.sort(x)[-rows.top_k[row]]] = -np.inf
    if rows.top_p[row] < 1.0:
        values, groups = np.unique(-x, return_inverse=True)  # descending x; equal values form one group
        mass = np.bincount(groups, weights=np.exp(log_softmax(x)), minlength=len(values))
        larger = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
        x[larger[groups] >= float(rows.top_p[row])] = -np.inf
    if rows.min_p[row] > 0.0:
        x[x < x.max() + np.log(float(rows.min_p[row]))] = -np.inf
    return x


def draw(x: Floats, rows: SamplingRows, row: int) -> int:
    """The token that `row` draws from its candidates."""
    if rows.temperature[row] == 0.0:
        return int(x.argmax())
    return int((x + gumbel(int(rows.seed[row]), int(rows.draw[row]), len(x))).argmax())


def sample(logits: NDArray[np.float32], batch: Batch) -> StepResult:
    """What a runner must answer for `batch` when its rows' last logits are `logits` [rows, vocab]."""
    rows = batch.sampling
    masks = dict(zip(batch.mask_rows.tolist(), unpack_mask(batch.masks, logits.shape[1]), strict=True))
    tokens = np.zeros(batch.num_rows, np.int32)
    for row in np.flatnonzero(batch.wants == Want.TOKEN).tolist():
        tokens[row] = draw(candidates(logits[row], rows, row, masks.get(row)), rows, row)
    most = int(rows.logprobs.max(initial=-1))
    if most < 0:
        return StepResult(tokens)
    logprobs = log_softmax(logits.astype(np.float64))
    top = np.argsort(-logprobs, axis=-1, kind="stable")[:, :most]
    return StepResult(
        tokens,
        logprobs=np.take_along_axis(logprobs, tokens[:, None], -1)[:, 0].astype(np.float32),
        top_tokens=top.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, top, -1).astype(np.float32),
    )


def _of_row(row: int, rows: Ints, *columns: NDArray[Any]) -> list[NDArray[Any]]:
    chosen = rows == row
    return [column[chosen] for column in columns]
