"""The sampler of the llama.cpp backend compared with engine/sampling.py, the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.llamacpp import sampler
from localllm.engine import sampling as oracle
from localllm.engine.batch import Batch, Want
from localllm.engine.request import Sampling
from localllm.engine.runner import StepResult

from .batches import Row, make_batch
from .test_sampler import VOCAB, random_row

LARGE = 30_000
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 20.0},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": LARGE - 1},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_k": 200, "top_p": 0.5},
    {"min_p": 0.2},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
]


@pytest.mark.parametrize("seed", range(60))
def test_sampler_equals_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(int(rng.integers(1, 12)))]
    logits = (rng.normal(size=(len(rows), VOCAB)) * rng.uniform(0.5, 5.0)).astype(np.float32)
    if seed % 3 == 0:
        logits = logits.round()  # ties everywhere
    samples = [index for index, row in enumerate(rows) if row.want == Want.TOKEN]
    rows = [row for row in rows if row.want != Want.HIDDEN]
    if samples:
        check(logits[samples], rows)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_large_vocabulary_equals_the_oracle(filters: dict[str, Any], scale: float) -> None:
    """Most tokens of a large vocabulary cannot be drawn, and the sampler does not compute their scores."""
    rng = np.random.default_rng(int(scale))
    logits = (rng.standard_normal((24, LARGE)) * scale).astype(np.float32)
    plain = Sampling(**{"temperature": 1.0, **filters})
    rows = [Row([1], 9, [1], sampling=replace(plain, seed=seed, logprobs=seed % 4)) for seed in range(len(logits))]
    for row in rows[::3]:
        row.mask = rng.random(LARGE) < 0.3
    for row in rows[::4]:
        row.sampling = replace(row.sampling, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((5, 3.0),))
        row.prompt = rng.integers(0, LARGE, 50).tolist()
        row.output = rng.integers(0, LARGE, 50).tolist()
    check(logits, rows)


def draw(logits: np.ndarray, batch: Batch, threads: int = 1) -> StepResult:
    samplers = sampler.Samplers(threads)
    result = sampler.Draws(batch, logits.shape[1], samplers).sample(logits, None)
    samplers.close()
    return result


def check(logits: np.ndarray, rows: list[Row]) -> None:
    batch = make_batch(rows, logits.shape[1])
    before = logits.copy()
    actual = draw(logits, batch, threads=1 + len(rows) % 3)
    expected = oracle.sample(logits, batch)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert actual.row_starts.tolist() == expected.row_starts.tolist()
    assert (logits == before).all(), "the sampler changed the logits"
    if expected.logprobs is None:
        assert actual.logprobs is None
        return
    listed = batch.sampling.logprobs >= 0
    for name in ("logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_allclose(getattr(actual, name)[listed], getattr(expected, name)[listed], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("filters", "remaining"),
    [({"top_p": 0.5}, {1}), ({"top_p": 0.5 + 2**-20}, {0, 1}), ({"top_k": 1}, {1}), ({"min_p": 1.0}, {1})],
    ids=str,
)
def test_filters_at_exact_limits(filters: dict[str, Any], remaining: set[int]) -> None:
    """Two tokens with a probability of 1/2 each, the first a little less likely."""
    rows = [Row([1], 0, [1], sampling=Sampling(temperature=1.0, seed=seed, **filters)) for seed in range(64)]
    drawn = draw(np.array([[-1e-30, 0.0]] * 64, np.float32), make_batch(rows, 2))
    assert set(drawn.tokens.tolist()) == remaining


def test_distribution_is_that_of_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rows = [Row([1], 0, [1], sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(4000)]
    drawn = draw(np.tile(logits, (len(rows), 1)), make_batch(rows, 4)).tokens
    shares = np.bincount(drawn, minlength=4) / len(rows)
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.03)
