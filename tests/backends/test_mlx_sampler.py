"""The sampler of MLX compared with engine/sampling.py, the oracle in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx

from localllm.backends.mlx import sampler
from localllm.engine import sampling as oracle
from localllm.engine.batch import Want
from localllm.engine.request import Sampling

from .batches import Row, make_batch
from .test_sampler import VOCAB, random_row

pytestmark = pytest.mark.real_otherdevice


@pytest.mark.parametrize("seed", range(60))
def test_sampler_equals_the_oracle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(int(rng.integers(1, 12)))]
    logits = (rng.normal(size=(len(rows), VOCAB)) * rng.uniform(0.5, 5.0)).astype(np.float32)
    if seed % 3 == 0:
        logits = logits.round()  # ties everywhere
    samples = np.array([index for index, row in enumerate(rows) if row.want == Want.TOKEN], int)
    batch = make_batch(rows, VOCAB)
    if not len(samples):
        return
    drawn, expected = sampler.sample(mx.array(logits[samples]), batch), oracle.sample(logits[samples], batch)
    assert np.array(drawn.tokens).tolist() == expected.tokens.tolist()
    counts = [rows[index].sampling.logprobs for index in samples if rows[index].sampling.logprobs is not None]
    if not counts:
        assert drawn.chosen is None
        return
    limit = max(counts)
    assert expected.logprobs is not None
    assert expected.top_tokens is not None
    assert expected.top_logprobs is not None
    np.testing.assert_allclose(np.array(drawn.chosen), expected.logprobs, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(np.array(drawn.top_tokens), expected.top_tokens[:, :limit])
    np.testing.assert_allclose(np.array(drawn.top), expected.top_logprobs[:, :limit], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("filters", "remaining"),
    [({"top_p": 0.5}, {1}), ({"top_p": 0.5 + 2**-20}, {0, 1}), ({"top_k": 1}, {1}), ({"min_p": 1.0}, {1})],
    ids=str,
)
def test_filters_at_exact_limits(filters: dict[str, Any], remaining: set[int]) -> None:
    """Two tokens with a probability of 1/2 each, the first a little less likely."""
    rows = [Row([1], 0, [1], sampling=Sampling(temperature=1.0, seed=seed, **filters)) for seed in range(64)]
    drawn = sampler.sample(mx.array([[-1e-30, 0.0]] * 64), make_batch(rows, 2))
    assert set(np.array(drawn.tokens).tolist()) == remaining
