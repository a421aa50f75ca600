"""Draws tokens from logits in numpy, as engine/sampling.py defines it, without work on tokens that cannot be drawn."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import AnswerSampling, Batch, Ints, Want
from ...engine.grammar import unpack_mask
from ...engine.runner import StepResult
from ...engine.sampling import GOLDEN, draw_key

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]
Ids = NDArray[np.int64]

MAX_NOISE = -math.log(-math.log1p(-(2.0**-24)))  # the largest Gumbel noise that 24 bits can give
FEW_TOKENS = 512  # with more tokens, their random bits tell which of them can have the best score
SAMPLE = 16  # ratio of the sample's size to top_k


def sample(logits: Logits, batch: Batch, hidden: NDArray[np.float32] | None) -> StepResult:
    """The result of a step. `logits`: [answers, vocab], which are not changed; rows of hidden states are ignored.
    `hidden`: [answers, hidden], or None."""
    sampling = batch.sampling
    wants = batch.wants[batch.wants != Want.NOTHING]
    tokens = np.zeros(len(wants), np.int32)
    drawing = np.flatnonzero(wants == Want.TOKEN)
    adjusted = {*sampling.bias_answers.tolist(), *sampling.history_answers.tolist(), *batch.mask_answers.tolist()}
    masks = _Masks(batch, logits.shape[1])
    for answer in drawing.tolist():
        row = logits[answer]
        if answer in adjusted:
            row = masks.apply(_adjust(row, sampling, answer), answer)
        tokens[answer] = row.argmax() if sampling.temperature[answer] == 0 else _draw(row, sampling, answer)
    count = int(sampling.logprobs.max(initial=-1))
    if count < 0:
        return StepResult(tokens, batch.answer_starts, hidden=hidden)
    return _listed(logits, tokens, batch, count, hidden)


class _Masks:
    """The allowed tokens of the answers that have a mask."""

    def __init__(self, batch: Batch, vocab: int) -> None:
        self._index = {answer: index for index, answer in enumerate(batch.mask_answers.tolist())}
        self._masks = batch.masks
        self._vocab = vocab

    def apply(self, x: Logits, answer: int) -> Logits:
        """The logits `x` [vocab] of an answer; -inf for the tokens that its mask excludes."""
        index = self._index.get(answer)
        if index is None:
            return x
        allowed = unpack_mask(self._masks[index : index + 1], self._vocab)[0]
        return np.where(allowed, x, np.float32(-np.inf))


def _adjust(row: Logits, sampling: AnswerSampling, answer: int) -> Logits:
    """A copy of the logits [vocab] with the biases and penalties of an answer."""
    x = row.copy()
    biases = sampling.bias_answers == answer
    np.add.at(x, sampling.bias_tokens[biases], sampling.bias_values[biases])
    history = sampling.history_answers == answer
    tokens = sampling.history_tokens[history]
    in_output = sampling.history_output[history]
    penalty = sampling.repetition_penalty[answer]
    values = x[tokens]
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= sampling.frequency_penalty[answer] * in_output + sampling.presence_penalty[answer] * (in_output > 0)
    x[tokens] = values
    return x


def _draw(row: Logits, sampling: AnswerSampling, answer: int) -> int:
    """The token that a random answer draws from the logits [vocab].

    Each filter keeps the tokens from some logit on, so it suffices to test the token with the best score. If the test
    of top_p fails, the next token is the best one among those with larger logits.
    """
    temperature = float(sampling.temperature[answer])
    top_k = int(sampling.top_k[answer])
    top_p = float(sampling.top_p[answer])
    min_p = float(sampling.min_p[answer])
    draw = _Draw(row, temperature, draw_key(int(sampling.seed[answer]), int(sampling.draw[answer])))
    floor = draw.floor
    candidates = row
    if 0 < top_k < len(row):
        last = _last_largest(row, top_k)
        floor = max(floor, last)
        candidates = row[np.flatnonzero(row >= last)]
    if min_p > 0:
        floor = max(floor, np.float32(draw.largest + temperature * math.log(min_p)))
    token = draw.best(floor)
    if top_p < 1:
        masses = _masses(candidates, draw.largest, temperature)
        limit = top_p * float(masses.sum())
        while np.where(candidates > row[token], masses, np.float32(0)).sum() >= limit:
            floor = np.nextafter(row[token], np.float32(np.inf))
            token = draw.best(floor)
    return token


class _Draw:
    """The scores of one draw. The score of a token is its logit divided by the temperature, plus its noise."""

    def __init__(self, row: Logits, temperature: float, key: NDArray[np.uint32]) -> None:
        likeliest = int(row.argmax())
        self._row = row
        self._temperature = temperature
        self._key = key
        self.largest = float(row[likeliest])
        self._score = self._scores(np.array([likeliest]), _bits(key, np.array([likeliest])))[0]
        # A token below this logit has a smaller score than the likeliest one, which no filter excludes.
        self.floor = _below((self._score - MAX_NOISE) * temperature)

    def best(self, floor: np.float32) -> int:
        """The token with the largest score, among those with logits of at least `floor`; the smallest id among
        equals."""
        tokens = np.flatnonzero(self._row >= floor)
        bits = _bits(self._key, tokens)
        if len(tokens) > FEW_TOKENS:
            # With the largest logit, a token needs this noise for a score as good as those of a few tokens.
            few = np.flatnonzero(bits >= np.uint32(2**24 - 2**24 * FEW_TOKENS // len(tokens)))
            good = max(self._score, self._scores(tokens[few], bits[few]).max(initial=-np.inf))
            noise = float(_below(good)) - self.largest / self._temperature
            possible = np.flatnonzero(bits >= np.uint32(2**24 * math.exp(-math.exp(min(-noise, 700.0)))))
            tokens = tokens[possible]
            bits = bits[possible]
        return int(tokens[self._scores(tokens, bits).argmax()])

    def _scores(self, tokens: Ids, bits: NDArray[np.uint32]) -> Scores:
        noise: Scores = -np.log(-np.log(bits / 2.0**24))
        scores: Scores = self._row[tokens].astype(np.float64) / self._temperature + noise
        return scores


def _last_largest(row: Logits, count: int) -> np.float32:
    """The count-th largest value of `row`."""
    sample = row[:: max(1, len(row) // (SAMPLE * count))]
    if len(sample) == len(row):
        return np.float32(np.partition(row, -count)[-count])
    bound = np.partition(sample, -count)[-count]  # no larger than the count-th largest value of the whole row
    return np.float32(np.partition(row[np.flatnonzero(row >= bound)], -count)[-count])


def _masses(values: Logits, largest: float, temperature: float) -> Logits:
    """The probabilities of these logits in units of that of the largest one."""
    scaled = values - np.float32(largest)
    scaled /= np.float32(temperature)
    np.exp(scaled, out=scaled)
    return scaled


def _below(score: float) -> np.float32:
    """A value below `score` by more than the rounding errors of a score in float32."""
    return np.float32(score - 1e-3 - 1e-6 * abs(score))


def _bits(key: NDArray[np.uint32], tokens: Ids) -> NDArray[np.uint32]:
    """24 random bits for each token, the last of which is 1."""
    h = tokens.astype(np.uint32)
    h ^= key
    h += GOLDEN
    scratch = h >> np.uint32(16)
    h ^= scratch
    h *= np.uint32(0x85EBCA6B)
    np.right_shift(h, np.uint32(13), out=scratch)
    h ^= scratch
    h *= np.uint32(0xC2B2AE35)
    np.right_shift(h, np.uint32(16), out=scratch)
    h ^= scratch
    h >>= np.uint32(8)
    h |= np.uint32(1)
    return h


def _listed(logits: Logits, tokens: Ints, batch: Batch, count: int, hidden: NDArray[np.float32] | None) -> StepResult:
    """The result with log-probabilities of the raw logits, and the `count` likeliest tokens of each answer."""
    count = min(count, logits.shape[1])
    chosen = np.zeros(len(tokens), np.float32)
    top_tokens = np.zeros((len(tokens), count), np.int32)
    top_logprobs = np.zeros((len(tokens), count), np.float32)
    for answer in np.flatnonzero(batch.sampling.logprobs >= 0).tolist():
        row = logits[answer]
        largest = float(row.max())
        shift = largest + math.log(_masses(row, largest, 1.0).sum())
        chosen[answer] = row[tokens[answer]] - shift
        if count:
            ids = np.flatnonzero(row >= _last_largest(row, count))
            ids = ids[np.argsort(-row[ids], kind="stable")][:count]
            top_tokens[answer] = ids
            top_logprobs[answer] = row[ids] - shift
    return StepResult(tokens, batch.answer_starts, chosen, top_tokens, top_logprobs, hidden)
