"""Draws tokens from logits in numpy, as engine/sampling.py defines it, without work on tokens that cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints, SampleSettings, Want
from ...engine.grammar import unpack_mask
from ...engine.runner import StepResult
from ...engine.sampling import GOLDEN, draw_key

Logits = NDArray[np.float32]
Scores = NDArray[np.float64]
Ids = NDArray[np.int64]

MAX_NOISE = -math.log(-math.log1p(-(2.0**-24)))  # the largest Gumbel noise that 24 bits can give
SPARE_MASS = 1e-4  # share of the mass of all tokens; more than the rounding errors of sums in float32
FEW_TOKENS = 512  # with more tokens, their random bits exclude most of them from having the best score
MAX_THREADS = 4  # with more threads, the interpreter lock limits the speed
THREAD_WORK = 2**20  # logits that a thread reads; with less work, starting the thread takes longer
PASSES = 8  # times that a random sample reads its logits; a greedy sample reads them once
BLOCKS = 16  # number of blocks of a row for each of its largest logits


class Samplers:
    """Threads that sample. numpy releases the interpreter lock, so several threads read logits at the same time."""

    def __init__(self, threads: int) -> None:
        self._count = min(threads, MAX_THREADS)
        self._pool = ThreadPoolExecutor(self._count - 1, "sampler") if self._count > 1 else None

    def share(self, function: Callable[[list[int]], None], samples: list[int], work: int) -> None:
        """Call the function with all samples, divided over threads. `work`: the number of logits that it reads."""
        count = min(self._count, len(samples), work // THREAD_WORK)
        if self._pool is None or count < 2:
            function(samples)
            return
        first, *others = (samples[start::count] for start in range(count))
        tasks = [self._pool.submit(function, share) for share in others]
        function(first)
        for task in tasks:
            task.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


class Draws:
    """The samples of one step, without their logits."""

    def __init__(self, batch: Batch, vocab: int, samplers: Samplers) -> None:
        sampling = batch.sampling
        wants = batch.wants[batch.wants != Want.NOTHING]
        self._samples = len(wants)
        self._starts = batch.sample_starts
        self._sampling = sampling
        self._drawing: list[int] = np.flatnonzero(wants == Want.TOKEN).tolist()
        self._listed = {index: count for index, count in enumerate(sampling.logprobs.tolist()) if count >= 0}
        self._adjusted = {*sampling.bias_samples.tolist(), *sampling.history_samples.tolist()}
        self._greedy = (sampling.temperature == 0).tolist()
        self._masks = _Masks(batch, vocab)
        self._vocab = vocab
        self._samplers = samplers

    def sample(self, logits: Logits, hidden: NDArray[np.float32] | None) -> StepResult:
        """The result of the step. `logits`: [samples, vocab], which are not changed; rows of hidden states are ignored.
        `hidden`: [samples, hidden], or None."""
        tokens = np.zeros(self._samples, np.int32)

        def draw(samples: list[int]) -> None:
            for sample in samples:
                tokens[sample] = self._draw(logits[sample], sample)

        random = sum(not self._greedy[sample] for sample in self._drawing)
        passes = len(self._drawing) + (PASSES - 1) * random
        self._samplers.share(draw, self._drawing, passes * self._vocab)
        if not self._listed:
            return StepResult(tokens, self._starts, hidden=hidden)
        likeliest = _Likeliest(logits, tokens, min(max(self._listed.values()), self._vocab))
        self._samplers.share(likeliest.list, list(self._listed), PASSES * len(self._listed) * self._vocab)
        return StepResult(tokens, self._starts, likeliest.chosen, likeliest.tokens, likeliest.logprobs, hidden)

    def _draw(self, row: Logits, sample: int) -> int:
        if sample in self._adjusted:
            row = _adjust(row, self._sampling, sample)
        row = self._masks.apply(row, sample)
        if self._greedy[sample]:
            return int(row.argmax())
        return _draw(row, self._sampling, sample)


class _Masks:
    """The allowed tokens of the samples that have a mask."""

    def __init__(self, batch: Batch, vocab: int) -> None:
        self._index = {sample: index for index, sample in enumerate(batch.mask_samples.tolist())}
        self._masks = batch.masks
        self._vocab = vocab

    def apply(self, x: Logits, sample: int) -> Logits:
        """The logits `x` [vocab] of a sample; -inf for the tokens that its mask excludes."""
        index = self._index.get(sample)
        if index is None:
            return x
        allowed = unpack_mask(self._masks[index : index + 1], self._vocab)[0]
        return np.where(allowed, x, np.float32(-np.inf))


def _adjust(row: Logits, sampling: SampleSettings, sample: int) -> Logits:
    """A copy of the logits [vocab] with the biases and penalties of a sample."""
    x = row.copy()
    biases = sampling.bias_samples == sample
    np.add.at(x, sampling.bias_tokens[biases], sampling.bias_values[biases])
    history = sampling.history_samples == sample
    tokens = sampling.history_tokens[history]
    in_output = sampling.history_output[history]
    penalty = sampling.repetition_penalty[sample]
    values = x[tokens]
    values = np.where(values > 0, values / penalty, values * penalty)
    values -= sampling.frequency_penalty[sample] * in_output + sampling.presence_penalty[sample] * (in_output > 0)
    x[tokens] = values
    return x


def _draw(row: Logits, sampling: SampleSettings, sample: int) -> int:
    """The token that a random sample draws from the logits [vocab].

    Each filter keeps the tokens from some logit on, so it suffices to test the token with the best score. If the test
    of top_p fails, the next token is the best one among those with larger logits.
    """
    temperature = float(sampling.temperature[sample])
    top_k = int(sampling.top_k[sample])
    top_p = float(sampling.top_p[sample])
    min_p = float(sampling.min_p[sample])
    key = draw_key(int(sampling.seed[sample]), int(sampling.draw[sample]))
    tokens = _largest(row, top_k) if 0 < top_k < len(row) else None
    draw = _Draw(row, tokens, temperature, key)
    if min_p > 0:
        draw.floor = max(draw.floor, np.float32(draw.largest + temperature * math.log(min_p)))
    if top_p == 1:
        best = draw.best()
    else:
        masses = _masses(draw.logits, draw.largest, temperature)
        total = float(masses.sum())
        # Tokens with less than this mass have, all together, not the mass that top_p excludes: no such token remains.
        mass = (1 - top_p - SPARE_MASS) * total / len(masses)
        if mass > 0:
            draw.floor = max(draw.floor, _below(draw.largest + temperature * math.log(mass)))
        best = draw.best()
        while draw.logits[best] < draw.largest and _sum_larger(draw.logits, masses, best) >= top_p * total:
            draw.floor = np.nextafter(draw.logits[best], np.float32(np.inf))
            best = draw.best()
    return best if tokens is None else int(tokens[best])


class _Draw:
    """The scores of one draw. The score of a token is its logit divided by the temperature, plus its noise."""

    def __init__(self, row: Logits, tokens: Ids | None, temperature: float, key: NDArray[np.uint32]) -> None:
        """`tokens`: the tokens that may be drawn, in ascending order; None: all tokens of the row."""
        self.logits = row if tokens is None else row[tokens]
        self._tokens = tokens
        self._temperature = temperature
        self._key = key
        likeliest = np.array([self.logits.argmax()])
        self.largest = float(self.logits[likeliest[0]])
        self._score = self._scores(likeliest, self._bits(likeliest))[0]
        # A token below this logit has a smaller score than the likeliest one, which no filter excludes.
        self.floor = _below((self._score - MAX_NOISE) * temperature)

    def best(self) -> int:
        """The index in `logits` of the token with the largest score, among those with logits of at least `floor`; the
        smallest index among equals."""
        indices = np.flatnonzero(self.logits >= self.floor)
        bits = self._bits(indices)
        if len(indices) > FEW_TOKENS:
            # With the largest logit, a token needs this noise for a score as good as those of a few tokens.
            few = np.flatnonzero(bits >= np.uint32(2**24 - 2**24 * FEW_TOKENS // len(indices)))
            good = max(self._score, self._scores(indices[few], bits[few]).max(initial=-np.inf))
            noise = float(_below(good)) - self.largest / self._temperature
            possible = np.flatnonzero(bits >= np.uint32(2**24 * math.exp(-math.exp(min(-noise, 700.0)))))
            indices = indices[possible]
            bits = bits[possible]
        return int(indices[self._scores(indices, bits).argmax()])

    def _bits(self, indices: Ids) -> NDArray[np.uint32]:
        return _bits(self._key, indices if self._tokens is None else self._tokens[indices])

    def _scores(self, indices: Ids, bits: NDArray[np.uint32]) -> Scores:
        noise: Scores = -np.log(-np.log(bits / 2.0**24))
        scores: Scores = self.logits[indices].astype(np.float64) / self._temperature + noise
        return scores


def _largest(row: Logits, count: int) -> Ids:
    """The tokens with the `count` largest logits, and those with equal logits, in ascending order."""
    width = len(row) // (BLOCKS * count)
    if width < 2:
        return np.flatnonzero(row >= np.partition(row, -count)[-count])
    maxima = row[: len(row) // width * width].reshape(-1, width).max(axis=1)
    tokens: Ids = np.flatnonzero(row >= np.partition(maxima, -count)[-count])  # `count` blocks have such a logit
    logits = row[tokens]
    largest: Ids = tokens[logits >= np.partition(logits, -count)[-count]]
    return largest


def _masses(values: Logits, largest: float, temperature: float) -> Logits:
    """The probabilities of these logits in units of that of the largest one."""
    scaled = values - np.float32(largest)
    scaled /= np.float32(temperature)
    np.exp(scaled, out=scaled)
    return scaled


def _sum_larger(values: Logits, masses: Logits, token: int) -> np.float32:
    """The sum of the masses of the tokens with larger logits than this one."""
    total: np.float32 = (masses * (values > values[token])).sum()  # np.where takes four times as long
    return total


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


class _Likeliest:
    """Log-probabilities of the raw logits: of the drawn tokens, and of the `count` likeliest tokens of each sample."""

    def __init__(self, logits: Logits, drawn: Ints, count: int) -> None:
        self._logits = logits
        self._drawn = drawn
        self._count = count
        self.chosen = np.zeros(len(drawn), np.float32)
        self.tokens = np.zeros((len(drawn), count), np.int32)
        self.logprobs = np.zeros((len(drawn), count), np.float32)

    def list(self, samples: list[int]) -> None:
        """Compute the log-probabilities of these samples, of the fields `chosen`, `tokens` and `logprobs`."""
        for sample in samples:
            row = self._logits[sample]
            largest = float(row.max())
            shift = largest + math.log(_masses(row, largest, 1.0).sum())
            self.chosen[sample] = row[self._drawn[sample]] - shift
            if self._count:
                ids = _largest(row, self._count)
                ids = ids[np.argsort(-row[ids], kind="stable")][: self._count]
                self.tokens[sample] = ids
                self.logprobs[sample] = row[ids] - shift
