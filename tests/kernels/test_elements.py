"""Norms, activations, cache writes and sampling on the CPU, in every ISA variant of this machine and with several
numbers of threads: strides, NaN and infinity, idle threads, and large vocabularies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localllm.backends.cpu import device as cpu
from localllm.engine import sampling as oracle
from localllm.kernels.ops import Ops
from localllm.kernels.ops.sampling import Draws

sys.path.insert(0, str(Path(__file__).parent))
from oracle_draws import FILTERS, SHAPES, draws, expected_token

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(cpu.MISSING), reason=cpu.MISSING or ""),
]

REFERENCE, FAST = Ops(), cpu.OPS
LANES = [] if cpu.MISSING else torch.ops.localllm.variants().split()
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAN, INF = float("nan"), float("inf")


def teams() -> Iterator[Any]:
    """Each ISA variant with 1 and 3 workers. The best variant runs both in `make test`, the others one in turn."""
    for index, lane in enumerate(LANES):
        for workers in (1, 3):
            often = lane == LANES[-1] or workers == (1, 3)[index % 2]
            yield pytest.param(f"{lane}-{workers}", marks=[] if often else [pytest.mark.slow])


@pytest.fixture(params=teams(), autouse=True)
def team(request: pytest.FixtureRequest) -> Iterator[int]:
    """A variant and a number of threads. Outputs are full of NaN before they are written."""
    lane, workers = request.param.split("-")
    before = torch.ops.localllm.threads()
    torch.ops.localllm.use_variant(lane)
    torch.use_deterministic_algorithms(True)
    yield torch.ops.localllm.use_threads(int(workers))
    torch.use_deterministic_algorithms(False)
    torch.ops.localllm.use_threads(before)
    torch.ops.localllm.use_variant("")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 31, 33, 257])
@pytest.mark.parametrize("dim", [1, 7, 64, 1000])
def test_norms_of_any_shape(rows: int, dim: int) -> None:
    x, residual, weight = (numbers(*s, seed=i) for i, s in enumerate([(rows, dim), (rows, dim), (dim,)]))
    near(FAST.norm.rms(x, weight, 1e-6), REFERENCE.norm.rms(x.double(), weight.double(), 1e-6), 5e-6)
    expected = REFERENCE.norm.add_rms(x, residual, weight, 1e-6, 1.0)
    for found, other in zip(FAST.norm.add_rms(x, residual.clone(), weight, 1e-6, 1.0), expected, strict=True):
        near(found, other, 5e-6)


def test_norms_of_strided_rows() -> None:
    whole, weight = numbers(40, 12, 40), numbers(32, seed=1)
    for x in (whole[:, 2:7, :32].contiguous(), whole.view(40, 15, 32)[:, 3:7], whole[:, :, 4:36], whole[:, 0, 1:33]):
        near(FAST.norm.rms(x, weight, 1e-6), REFERENCE.norm.rms(x.double(), weight.double(), 1e-6), 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_residual_is_normalised(dtype: torch.dtype) -> None:
    x, residual, weight = numbers(5, 96, dtype=dtype), numbers(5, 96, seed=1, dtype=dtype), torch.ones(96, dtype=dtype)
    kept = x + residual
    found, written = FAST.norm.add_rms(x, residual, weight, 1e-6)
    assert torch.equal(written, kept)
    near(found, REFERENCE.norm.rms(kept.double(), weight.double(), 1e-6), TOLERANCES[dtype])


ACTIVATIONS = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_as_accurate_as_float32_is(name: str) -> None:
    x = torch.linspace(-20.0, 20.0, 40_003)
    gate_up = torch.cat([x, torch.ones_like(x)]).unsqueeze(0)
    expected = getattr(REFERENCE.activation, name)(gate_up.double())
    error = (getattr(FAST.activation, name)(gate_up) - expected).abs() / expected.abs().clamp(min=0.01)
    assert error.max() < 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dim", [1, 8, 19, 700])
def test_activations_of_any_width(name: str, dim: int) -> None:
    whole = numbers(3, 2 * dim + 5)
    for gate_up in (whole[:, : 2 * dim], whole[:, : 2 * dim].unsqueeze(0), whole[:0, : 2 * dim]):
        near(getattr(FAST.activation, name)(gate_up), getattr(REFERENCE.activation, name)(gate_up), 2e-6)


def test_nan_stays_in_its_row() -> None:
    x = numbers(4, 70)
    x[1, 69], x[2, 3] = NAN, INF
    for op in (partial(FAST.norm.rms, weight=torch.ones(70), eps=1e-6), *map(activation, ACTIVATIONS)):
        found = op(x)
        assert found[[0, 3]].isfinite().all()
        assert not found[1].isfinite().all()
        assert not found[2].isfinite().all()
    near(
        FAST.activation.gelu_and_mul(torch.tensor([[INF, NAN, 0.0, 1.0, 1.0, 1.0]])), torch.tensor([[INF, NAN, 0.0]]), 0
    )


def activation(name: str) -> Callable[..., torch.Tensor]:
    return getattr(FAST.activation, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float16])
def test_store_converts_strided_rows(dtype: torch.dtype, cache: torch.dtype) -> None:
    qkv = numbers(5, 8, 19, dtype=dtype)
    pages = torch.full((2, 4, 3, 2, 19), 7.0, dtype=cache)
    slots = torch.tensor([11, 0, 5, 3, 7])
    FAST.kv.store(qkv[:, 4:6], qkv[:, 6:], pages[0], pages[1], slots)
    written = pages.flatten(1, 2)
    assert torch.equal(written[0, slots], qkv[:, 4:6].to(cache))
    assert torch.equal(written[1, slots], qkv[:, 6:].to(cache))
    left = torch.ones(12, dtype=torch.bool).index_fill(0, slots, False)
    assert (written[:, left] == 7.0).all()


EDGES = [
    0.0,
    -0.0,
    INF,
    -INF,
    NAN,
    65504.0,
    65519.99,
    65520.0,
    -1e5,
    3.3895e38,
    3.4e38,
    6.1e-5,
    6e-8,
    3e-8,
    -2.9e-8,
    1e-40,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_values_are_converted_as_in_torch(dtype: torch.dtype, cache: torch.dtype) -> None:
    """Except subnormal bfloat16 numbers, which AVX-512 does not have."""
    x = torch.tensor([*EDGES, 1.0]).to(dtype).view(1, 1, -1)  # in whole vectors, and behind them
    pages = torch.zeros(2, 1, 1, *x.shape[1:], dtype=cache)
    FAST.kv.store(x, -x, *pages, torch.tensor([0]))
    for found, expected in zip(pages.flatten(1), (x, -x), strict=True):
        torch.testing.assert_close(found, expected.flatten().to(cache), rtol=0, atol=1e-38, equal_nan=True)


def test_embedding_scales_as_the_reference_does() -> None:
    tokens = torch.tensor([3, 0, 49, 3], dtype=torch.int32)
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        weight = numbers(50, 33, dtype=stored)
        for dtype in (None, torch.float32, torch.bfloat16):
            found = FAST.linear.embedding(tokens, weight, 33**0.5, dtype)
            expected = REFERENCE.linear.embedding(tokens, weight, 33**0.5, dtype)
            assert found.dtype == expected.dtype
            near(found, expected, TOLERANCES[found.dtype])


ORACLE: dict[tuple[str, str], list[int]] = {}  # its answers, asked once for all lanes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("filters", FILTERS, ids=lambda filters: "-".join(filters) or "plain")
def test_draws_equal_the_oracle(shape: str, filters: dict[str, Any]) -> None:
    """All threads draw one row together; each of five rows is drawn by one thread. The tokens are the same."""
    logits = SHAPES[shape](numbers(5, 9_001, seed=3))
    how = draws(5, **filters)
    key = shape, str(filters)
    expected = ORACLE.get(key) or ORACLE.setdefault(key, [expected_token(logits, how, row) for row in range(5)])
    assert FAST.sampling.draw(logits.clone(), how).tolist() == expected
    alone = [
        FAST.sampling.draw(logits[row : row + 1].clone(), only(how, slice(row, row + 1))).item() for row in range(5)
    ]
    assert alone == expected


def only(how: Draws, rows: slice) -> Draws:
    return how._replace(
        **{name: value[rows] for name, value in how._asdict().items() if value is not None and name != "max_k"}
    )


def test_many_threads_draw_one_row() -> None:
    """The intermediate results of all threads fill more than a cache line."""
    assert torch.ops.localllm.use_threads(20) == 20
    logits = numbers(2, 9_001, seed=4)
    for filters in ({"top_p": 0.9}, {"top_k": 3000}, {"min_p": 0.02}):
        how = draws(2, **filters)
        assert FAST.sampling.draw(logits.clone(), how).tolist() == [expected_token(logits, how, row) for row in (0, 1)]


@pytest.mark.parametrize("vocab", [2, 127, 129, 1000])
def test_draws_from_a_small_vocabulary(vocab: int) -> None:
    logits = numbers(4, vocab + 3)[:, :vocab]  # rows lie apart
    how = draws(4, top_k=5, top_p=0.8)
    assert FAST.sampling.draw(logits, how).tolist() == [expected_token(logits, how, row) for row in range(4)]


def test_nan_is_the_likeliest_token_with_any_filter() -> None:
    for rows in (1, 5):
        logits = numbers(rows, 1000)
        logits[:, [999, 400]], logits[:, 2] = NAN, INF
        for filters in FILTERS:
            assert FAST.sampling.draw(logits.clone(), draws(rows, **filters)).tolist() == [400] * rows
        assert FAST.sampling.greedy(logits).tolist() == [400] * rows
        logits[:, [999, 400]] = 0.0
        for filters in FILTERS:
            assert FAST.sampling.draw(logits.clone(), draws(rows, **filters)).tolist() == [2] * rows


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("vocab", [1, 5, 128, 1_303])
def test_greedy_and_logprobs(rows: int, vocab: int) -> None:
    logits = numbers(rows, vocab, seed=vocab).round(decimals=1) * 3
    tokens = torch.arange(rows) % vocab
    assert torch.equal(FAST.sampling.greedy(logits), logits.argmax(-1))
    for k in (0, min(3, vocab), vocab):
        found, expected = (
            FAST.sampling.logprobs(logits, tokens, k),
            REFERENCE.sampling.logprobs(logits.double(), tokens, k),
        )
        near(found.chosen, expected.chosen, 2e-6)
        assert torch.equal(found.top_tokens, expected.top_tokens)
        near(found.top, expected.top, 2e-6)


def test_logprobs_of_a_row_with_nan_are_nan() -> None:
    logits = numbers(2, 300)
    logits[1, 7] = NAN
    found = FAST.sampling.logprobs(logits, torch.tensor([1, 2]), 2)
    assert found.chosen[0].isfinite()
    assert found.chosen[1].isnan()
    assert found.top[1].isnan().all()


def test_mask_of_strided_rows() -> None:
    logits, words = numbers(3, 80)[:, :77], torch.tensor([[-1, 0, 5], [0x0F0F, -1, -1]], dtype=torch.int32)
    expected = logits.clone()
    REFERENCE.sampling.mask(expected, torch.tensor([2, 0]), words)
    FAST.sampling.mask(logits, torch.tensor([2, 0]), words)
    assert torch.equal(logits, expected)


def test_more_threads_than_rows() -> None:
    """The rows are long enough for all threads: one or two rows for seven threads."""
    assert torch.ops.localllm.use_threads(7) == 7
    for rows in (1, 2):
        x, weight = numbers(rows, 2 * 8200), numbers(2 * 8200, seed=1)
        near(FAST.norm.rms(x, weight, 1e-6), REFERENCE.norm.rms(x.double(), weight.double(), 1e-6), 5e-6)
        near(FAST.activation.silu_and_mul(x), REFERENCE.activation.silu_and_mul(x.double()), 2e-6)
        assert torch.equal(FAST.linear.embedding(torch.arange(rows, dtype=torch.int32), x), x)
        pages = torch.zeros(2, 3, 1, 8, 1025)
        FAST.kv.store(*x.view(rows, 2, 8, 1025).unbind(1), *pages, torch.arange(rows))
        assert torch.equal(pages[:, :rows].flatten(1), x.view(rows, 2, -1).transpose(0, 1).flatten(1))
        FAST.kv.copy_pages(pages, torch.tensor([0]), torch.tensor([1]))
        assert torch.equal(pages[:, 1], pages[:, 0])
        assert torch.equal(FAST.sampling.greedy(x), x.argmax(-1))
        chosen = FAST.sampling.logprobs(x, torch.zeros(rows, dtype=torch.int64), 0).chosen
        near(chosen, x.double().log_softmax(-1)[:, 0], 2e-6)


def noise_of_two_tokens(how: Draws) -> np.ndarray:
    seeds = zip(how.seed_low.tolist(), how.seed_high.tolist(), how.position.tolist(), strict=True)
    return np.array([oracle.gumbel(low % 2**32 + (high % 2**32 << 32), at, 2) for low, high, at in seeds])


def test_noise_is_as_accurate_as_float32_is() -> None:
    """The draw changes between two tokens where the difference of their logits equals that of the noise."""
    how = draws(3000)
    noise = noise_of_two_tokens(how)
    turn, slack = noise[:, 1] - noise[:, 0], 1e-6 * (1 + np.abs(noise).max(axis=1))
    for offset, token in ((slack, 0), (-slack, 1)):
        logits = torch.from_numpy(np.stack([turn + offset, np.zeros(3000)], axis=1)).float()
        assert (FAST.sampling.draw(logits, how) == token).all()


@pytest.mark.parametrize(
    ("filters", "share"),  # of the likelier token's probability that the other one needs, to stay in the draw
    [({"min_p": 0.3}, 0.3), ({"top_p": 0.75}, 1 / 3), ({"temperature": 0.5, "top_p": 0.75}, 1 / 3)],
    ids=["min_p", "top_p", "top_p-cool"],
)
def test_filters_remove_the_expected_tokens(filters: dict[str, Any], share: float) -> None:
    """Without the filter, the noise would select the less likely of two tokens."""
    how = draws(300, **filters)
    wins = torch.from_numpy(noise_of_two_tokens(how) @ [-1.0, 1.0] > 1 - np.log(share))
    assert wins.sum() > 10
    for factor, token in ((1.00001, 1), (0.99999, 0)):
        below = np.log(share * factor) * filters.get("temperature", 1.0)
        logits = torch.tensor([0.0, below], dtype=torch.float32).repeat(300, 1)
        assert (FAST.sampling.draw(logits, how)[wins] == token).all()


@pytest.mark.parametrize("ops", [REFERENCE, FAST], ids=["reference", "fast"])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.5 + 2**-20}, {0, 1}),
        ({"top_k": 1}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_p": 2**-126}, {1}),
    ],
    ids=str,
)
def test_filters_at_their_exact_limit(ops: Ops, filters: dict[str, Any], kept: set[int]) -> None:
    """Two tokens of probability 1/2 each; the first is slightly less likely."""
    how = draws(64, **filters)._replace(max_k=2)
    found = ops.sampling.draw(torch.tensor([-1e-30, 0.0]).repeat(64, 1), how)
    assert set(found.tolist()) == kept


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.1, 1.9])
def test_the_last_value_within_a_filter_can_be_drawn(temperature: float) -> None:
    """If the filter keeps one token, the draw returns it, however the division by the temperature rounds."""
    logits = numbers(200, 300, seed=8)
    for rows in (slice(None), slice(1)):
        found = FAST.sampling.draw(logits[rows], only(draws(200, temperature=temperature, top_k=1), rows))
        assert torch.equal(found, logits[rows].argmax(-1))


@pytest.mark.timeout(150, method="thread")  # a kernel that hangs takes no signal
def test_a_nucleus_of_almost_all_tokens() -> None:
    """Rounding may keep the sum of all tokens below top_p; then all tokens are in the nucleus."""
    for seed in range(20):
        logits = torch.full((1, 128 * 70), -40.0)
        logits[0, ::128] = numbers(70, seed=seed) * 0.3
        how = draws(1, top_p=1 - 2**-24)
        assert FAST.sampling.draw(logits, how).item() == expected_token(logits, how, 0)
