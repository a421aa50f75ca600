"""The torch sampler against the numpy reference, and its draws against the expected distribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localllm.backends.cpu import device as cpu
from localllm.backends.pytorch.inputs import Inputs
from localllm.backends.pytorch.sampler import Drawn, sample
from localllm.engine import sampling as oracle
from localllm.engine.batch import Want
from localllm.engine.request import Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec
from localllm.kernels.ops.sampling import Logprobs

from .batches import Row, make_batch

VOCAB = 333
DEVICES = [cpu.DEVICE]
if torch.cuda.is_available():
    from localllm.backends.cuda import device as cuda

    DEVICES.append(cuda.DEVICE)
SPEC = RunnerSpec(VOCAB, max_tokens=64, max_rows=64, max_context=64, groups=(CacheGroup(16, 8),))


def draw(device: Any, logits: np.ndarray, rows: list[Row]) -> tuple[np.ndarray, Any]:
    """The results of the sampler and of the numpy reference for logits [rows, vocab]."""
    batch = make_batch(rows, logits.shape[1])
    sent = Inputs(SPEC, device).send(batch)
    with torch.inference_mode():
        drawn = sample(torch.from_numpy(logits[sent.samples]).to(device.name), batch, sent, device)
    listed = None if drawn.logprobs is None else Logprobs(*(one.cpu() for one in drawn.logprobs))
    return Drawn(drawn.tokens.cpu(), listed), oracle.sample(logits[sent.samples], batch)


def random_sampling(rng: np.random.Generator) -> Sampling:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    biased = rng.choice(VOCAB, rng.integers(1, 6), replace=False)
    return Sampling(
        temperature=maybe(float(rng.uniform(0.1, 3.0)), 0.0 if rng.random() < 0.3 else 1.0),
        top_k=maybe(int(rng.integers(1, 400)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.4)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2.0, 2.0)), 0.0),
        logit_bias=maybe(tuple((int(token), float(rng.uniform(-5, 5))) for token in biased), ()),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=maybe(int(rng.integers(0, 21)), None),
    )


def random_row(rng: np.random.Generator) -> Row:
    mask = rng.random(VOCAB) < 0.3
    mask[rng.integers(VOCAB)] = True
    return Row(
        tokens=[1],
        start=int(rng.integers(0, 16)),
        pages=[1],
        want=Want.TOKEN if rng.random() < 0.8 else Want.NOTHING,
        sampling=random_sampling(rng),
        prompt=rng.integers(0, VOCAB, 20).tolist(),
        output=rng.integers(0, VOCAB, 12).tolist(),
        mask=mask if rng.random() < 0.3 else None,
        draw=int(rng.integers(0, 2**31)),
    )


@pytest.mark.real
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("seed", range(60))
def test_equals_the_oracle(device: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(int(rng.integers(1, 12)))]
    logits = (rng.normal(size=(len(rows), VOCAB)) * rng.uniform(0.5, 5.0)).astype(np.float32)
    if seed % 3 == 0:
        logits = logits.round()  # ties everywhere
    drawn, expected = draw(device, logits, rows)
    samples = [index for index, row in enumerate(rows) if row.want == Want.TOKEN]
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    asked = [rows[index].sampling.logprobs for index in samples if rows[index].sampling.logprobs is not None]
    if not asked:
        assert drawn.logprobs is None
        return
    most = max(asked)
    np.testing.assert_allclose(drawn.logprobs.chosen.numpy(), expected.logprobs, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(drawn.logprobs.top_tokens.numpy(), expected.top_tokens[:, :most])
    np.testing.assert_allclose(drawn.logprobs.top.numpy(), expected.top_logprobs[:, :most], rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("listed", [0, 1])
def test_logprobs_ignore_biases(device: Any, listed: int) -> None:
    logits = np.random.default_rng(2).normal(size=(1, VOCAB)).astype(np.float32)
    drawn, expected = draw(
        device, logits, [Row([1], 0, [1], sampling=Sampling(logit_bias=((7, 50.0),), logprobs=listed))]
    )
    assert drawn.logprobs is not None
    assert drawn.tokens.tolist() == [7]
    np.testing.assert_allclose(drawn.logprobs.chosen.numpy(), expected.logprobs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_draws_do_not_depend_on_other_rows(device: Any) -> None:
    rng = np.random.default_rng(5)
    rows = [random_row(rng) for _ in range(9)]
    for row in rows:
        row.want = Want.TOKEN
    logits = rng.normal(size=(9, VOCAB)).astype(np.float32) * 3
    together, _ = draw(device, logits, rows)
    alone = [int(draw(device, logits[at : at + 1], [row])[0].tokens[0]) for at, row in enumerate(rows)]
    assert together.tokens.tolist() == alone


FILTERS = {
    "plain": Sampling(temperature=1.0),
    "cool": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.0, top_k=8),
    "top_p": Sampling(temperature=1.3, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.05),
}


@pytest.mark.real
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_distribution(device: Any, name: str) -> None:
    """Pearson's chi-square over 102,400 draws; the critical value is that of p = 1e-6, and the seed is fixed."""
    vocab, steps = 40, 1600
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 1.5
    settings = FILTERS[name]
    counts = np.zeros(vocab)
    spread = np.tile(logits, (64, 1))
    inputs = Inputs(SPEC, device)
    first = make_batch([Row([1], 0, [1], sampling=settings)] * 64, vocab)
    for step in range(steps):
        seeds = np.arange(64 * step, 64 * (step + 1), dtype=first.sampling.seed.dtype)
        batch = replace(first, sampling=replace(first.sampling, seed=seeds))
        sent = inputs.send(batch)
        with torch.inference_mode():
            drawn = sample(torch.from_numpy(spread).to(device.name, copy=True), batch, sent, device)
        counts += np.bincount(drawn.tokens.cpu().numpy(), minlength=vocab)
    remaining = oracle.candidates(logits, make_batch([Row([1], 0, [1], sampling=settings)], vocab).sampling, 0, None)
    expected = np.exp(oracle.log_softmax(remaining)) * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile; 4.7534 is the normal one.
    critical = freedom * (1 - 2 / (9 * freedom) + 4.7534 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < critical, (statistic, critical, freedom)


def test_seed_and_position_are_independent_counters() -> None:
    """Neighbouring seeds at the same position, and neighbouring positions of a seed, draw unrelated tokens."""
    vocab = 8
    logits = np.zeros((64, vocab), np.float32)
    hot = Sampling(temperature=1.0)
    for rows in (
        [Row([1], 0, [1], sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(64)],
        [Row([1], 0, [1], sampling=hot, draw=at) for at in range(64)],
    ):
        drawn, _ = draw(cpu.DEVICE, logits, rows)
        assert len(set(drawn.tokens.tolist())) == vocab
