from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.engine.batch import Batch, SampleSettings
from localllm.engine.engine import Engine
from localllm.engine.grammar import unpack_mask
from localllm.engine.request import Request, Sampling
from localllm.engine.sampling import candidates, draw, gumbel, log_softmax, mix, sample, uniform

from .token_device import SPEC, TokenDevice

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 3.0, 0.5, 2.0, 2.5], np.float32)


def batch_of(*samplings: Sampling, prompt: tuple[int, ...] = (1, 2, 1), output: int = 0) -> Batch:
    """The batch that draws the token after `output` others, one row for each sampling."""
    device = TokenDevice(SPEC)
    engine = Engine(device)
    for number, each in enumerate(samplings):
        engine.submit(Request(str(number), prompt, 10, each))
    for _ in range(output + 1):
        engine.step()
    return device.batches[-1]


def rows_of(sampling: Sampling, **changes: object) -> SampleSettings:
    return replace(batch_of(sampling).sampling, **changes)  # type: ignore[arg-type]


def kept(sampling: Sampling, logits: np.ndarray = LOGITS, mask: np.ndarray | None = None) -> list[int]:
    return np.flatnonzero(np.isfinite(candidates(logits, rows_of(sampling), 0, mask))).tolist()


def murmur(h: int) -> int:
    """fmix32 in plain integers."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 131071])
def test_the_noise_is_the_documented_formula(seed: int, position: int) -> None:
    golden = 0x9E3779B9
    key = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32, position):
        key = murmur((key ^ word) + golden & 0xFFFFFFFF)
    hashes = [murmur((key ^ token) + golden & 0xFFFFFFFF) for token in range(50)]
    expected = np.array([(h >> 8 | 1) / 2**24 for h in hashes])
    assert (uniform(seed, position, 50) == expected).all()
    assert np.allclose(gumbel(seed, position, 50), -np.log(-np.log(expected)))


def test_known_values_of_the_hash() -> None:
    assert mix(np.array([0, 1, 0xFFFFFFFF], np.uint32)).tolist() == [0, 0x514E28B7, 0x81F16F39]
    assert (uniform(42, 7, 3) * 2**24).tolist() == [murmur_uniform(42, 7, token) for token in range(3)]


def murmur_uniform(seed: int, position: int, token: int) -> int:
    h = 0
    for word in (seed, 0, position, token):
        h = murmur((h ^ word) + 0x9E3779B9 & 0xFFFFFFFF)
    return h >> 8 | 1


def test_numbers_are_uniform_and_exact_in_float32() -> None:
    for seed, position in ((0, 0), (1, 0), (0, 1), (2**40, 77)):
        u = uniform(seed, position, 200_000)
        assert ((u > 0) & (u < 1)).all()
        assert (u.astype(np.float32).astype(np.float64) == u).all()
        assert np.isfinite(gumbel(seed, position, 200_000)).all()
        counts = np.bincount((u * 64).astype(int), minlength=64)
        expected = len(u) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom: p < 1e-5


def test_neighbouring_seeds_positions_and_tokens_do_not_correlate() -> None:
    base = uniform(5, 9, 50_000)
    for other in (uniform(6, 9, 50_000), uniform(5, 10, 50_000), uniform(5 + 2**32, 9, 50_000), np.roll(base, 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.02


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.6, top_k=6, min_p=0.05)])
def test_draws_follow_the_probabilities(sampling: Sampling) -> None:
    """Chi-square over 40,000 draws: over positions, and over seeds."""
    rows = rows_of(sampling)
    x = candidates(LOGITS, rows, 0, None)
    p = np.exp(log_softmax(x))
    by_position = [int((x + gumbel(1, position, len(x))).argmax()) for position in range(20_000)]
    by_seed = [int((x + gumbel(seed, 3, len(x))).argmax()) for seed in range(20_000)]
    for draws in (by_position, by_seed):
        counts = np.bincount(draws, minlength=len(x))
        assert (counts[p == 0] == 0).all()
        expected = p[p > 0] * len(draws)
        assert ((counts[p > 0] - expected) ** 2 / expected).sum() < 35  # 7 degrees of freedom: p < 1e-4


def test_greedy_takes_the_smallest_id_among_equals() -> None:
    assert draw(candidates(LOGITS, rows_of(Sampling()), 0, None), rows_of(Sampling()), 0) == 1
    assert kept(Sampling(top_k=1, min_p=0.9)) == list(range(8))  # not applied: the draw is greedy


def test_top_k_keeps_ties_of_the_last_value() -> None:
    assert kept(Sampling(temperature=1.0, top_k=1)) == [1, 4]
    assert kept(Sampling(temperature=1.0, top_k=2)) == [1, 4]
    assert kept(Sampling(temperature=1.0, top_k=4)) == [1, 2, 4, 6, 7]
    assert (
        kept(Sampling(temperature=1.0, top_k=8)) == kept(Sampling(temperature=1.0, top_k=2**31 - 1)) == list(range(8))
    )


def test_top_p_keeps_the_smallest_set_and_ties_of_its_last_value() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    assert kept(Sampling(temperature=1.0, top_p=1e-9), logits) == [1]
    assert kept(Sampling(temperature=1.0, top_p=0.39), logits) == [1]
    assert kept(Sampling(temperature=1.0, top_p=0.41), logits) == [1, 2, 3]
    assert kept(Sampling(temperature=1.0, top_p=0.79), logits) == [1, 2, 3]
    assert kept(Sampling(temperature=1.0, top_p=0.81), logits) == [0, 1, 2, 3, 4]


def test_a_top_p_that_is_reached_exactly_keeps_no_more_tokens() -> None:
    """Two tokens of probability 1/2 each, the second a little less likely: 1/2 is reached by the first alone."""
    logits = np.array([-1e-30, 0.0], np.float32)
    assert np.exp(log_softmax(logits.astype(np.float64))).tolist() == [0.5, 0.5]
    assert kept(Sampling(temperature=1.0, top_p=0.5), logits) == [1]
    assert kept(Sampling(temperature=1.0, top_p=0.5 + 2**-20), logits) == [0, 1]
    assert kept(Sampling(temperature=1.0, top_p=0.5 - 2**-20), logits) == [1]


@pytest.mark.parametrize("top_p", [1e-30, 1e-46, 5e-324])
def test_a_tiny_top_p_keeps_the_likeliest_token(top_p: float) -> None:
    sampling = Sampling(temperature=1.0, top_p=top_p)
    assert kept(sampling) == [1, 4]
    assert 0 < rows_of(sampling).top_p[0] < 1


def test_top_p_sums_only_tokens_that_top_k_kept() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert kept(Sampling(temperature=1.0, top_p=0.55), logits) == [0, 1]
    assert kept(Sampling(temperature=1.0, top_p=0.55, top_k=2), logits) == [0]  # 0.4 of 0.7 suffices


def test_temperature_comes_before_top_p_and_min_p() -> None:
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    assert kept(Sampling(temperature=1.0, top_p=0.65), logits) == [0, 1]
    assert kept(Sampling(temperature=0.5, top_p=0.65), logits) == [0]
    assert kept(Sampling(temperature=1.0, min_p=0.4), logits) == [0, 1]
    assert kept(Sampling(temperature=0.5, min_p=0.4), logits) == [0]
    assert kept(Sampling(temperature=1.0, min_p=1.0), logits) == [0]


def test_bias_and_mask_come_before_the_greedy_choice() -> None:
    rows = rows_of(Sampling(logit_bias=((3, 5.0), (1, -100.0))))
    x = candidates(LOGITS, rows, 0, None)
    assert x.tolist() == pytest.approx([1.0, -97.0, 2.0, 4.0, 3.0, 0.5, 2.0, 2.5])
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 1], bool)
    assert draw(candidates(LOGITS, rows, 0, mask), rows, 0) == 7
    with pytest.raises(ValueError, match="sample 0 allows no token"):
        candidates(LOGITS, rows, 0, np.zeros(8, bool))


def test_penalties() -> None:
    """Token 1 stands in the prompt, 3 in the output (twice), 2 in both."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    history = {
        "history_samples": np.zeros(3, np.int32),
        "history_tokens": np.array([1, 2, 3], np.int32),
        "history_prompt": np.array([2, 1, 0], np.int32),
        "history_output": np.array([0, 1, 2], np.int32),
    }
    x = candidates(LOGITS, rows_of(sampling, **history), 0, None)
    assert x.tolist() == pytest.approx([1.0, 1.5, 2 / 2 - 0.5 - 0.25, -1 * 2 - 1.0 - 0.25, 3.0, 0.5, 2.0, 2.5])


def test_histories_count_all_tokens_so_far() -> None:
    batch = batch_of(Sampling(frequency_penalty=1.0), Sampling(), Sampling(presence_penalty=1.0), output=3)
    rows = batch.sampling
    for row in (0, 2):
        of_row = rows.history_samples == row
        assert rows.history_prompt[of_row].sum() == 3
        assert rows.history_output[of_row].sum() == 3
        assert rows.history_tokens[of_row][:2].tolist() == [1, 2]
        assert rows.history_prompt[of_row][:2].tolist() == [2, 1]
        assert len(set(rows.history_tokens[of_row].tolist())) == of_row.sum()
    assert not (rows.history_samples == 1).any()


def test_a_tiny_temperature_becomes_greedy_and_the_largest_top_k_fits_int32() -> None:
    rows = rows_of(Sampling(temperature=1e-30, top_k=2**31 - 1))
    assert rows.temperature.tolist() == [0.0]
    assert rows.top_k.tolist() == [2**31 - 1]


def test_other_rows_do_not_change_a_draw() -> None:
    sampling = Sampling(temperature=1.0, seed=9, top_p=0.8)
    others = [Sampling(temperature=2.0, seed=1), Sampling(logit_bias=((0, 50.0),)), Sampling(frequency_penalty=2.0)]
    alone = sample(LOGITS[None], batch_of(sampling)).tokens[0]
    together = sample(np.tile(LOGITS, (4, 1)), batch_of(*others, sampling)).tokens[3]
    assert together == alone


def test_logprobs_are_those_of_the_raw_logits() -> None:
    batch = batch_of(Sampling(temperature=0.1, logit_bias=((3, 100.0),), logprobs=3), Sampling(), Sampling(logprobs=0))
    result = sample(np.tile(LOGITS, (3, 1)), batch)
    raw = log_softmax(LOGITS.astype(np.float64))
    assert result.tokens.tolist() == [3, 1, 1]
    assert result.logprobs is not None
    assert result.top_tokens is not None
    assert result.top_logprobs is not None
    assert result.logprobs.tolist() == pytest.approx(raw[[3, 1, 1]].tolist())
    assert result.top_tokens[0].tolist() == [1, 4, 7]
    assert result.top_logprobs[0].tolist() == pytest.approx(raw[[1, 4, 7]].tolist())
    assert sample(LOGITS[None], batch_of(Sampling())).logprobs is None


def test_masks_unpack_bit_by_bit() -> None:
    words = np.array([[0b1001, 0x80000000, 1], [0, 0, 0]], np.uint32)
    allowed = unpack_mask(words, 70)
    assert allowed.shape == (2, 70)
    assert np.flatnonzero(allowed[0]).tolist() == [0, 3, 63, 64]
    assert not allowed[1].any()
