"""The Triton kernels of sampling, norms, activations, rotation, cache writes and recurrent layers: on a GPU, or else in
Triton's interpreter, which computes them in float32 with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from localllm.kernels.ops import Ops
from localllm.kernels.ops.activation import Activation
from localllm.kernels.ops.cases import CASES
from localllm.kernels.ops.cases.case import Case
from localllm.kernels.ops.cases.reference_check import call_op, copy_to
from localllm.kernels.ops.kv import KV, Append
from localllm.kernels.ops.norm import Norm
from localllm.kernels.ops.rope import Rope
from localllm.kernels.ops.sampling import Draws, Sampling
from localllm.kernels.ops.state import State
from localllm.kernels.triton import activation, kv, norm, rope, sampling, state

from ..accelerator import INTERPRETED, triton_device
from .oracle_draws import FILTERS, SHAPES, draws, expected_token
from .sample import one_of_each

DEVICE = triton_device()
if not DEVICE:
    pytest.skip("there is no GPU; test_triton_interpreted.py runs this", allow_module_level=True)
GPU = not INTERPRETED

pytestmark = [
    pytest.mark.real if GPU else pytest.mark.emulated,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # numpy's, in the interpreter
]

VOCAB = 20_011 if GPU else 2_411
REFERENCE = Ops()
FAST = Ops(
    norm=Norm(norm.rms_norm, norm.add_rms_norm),
    activation=Activation(activation.silu_and_mul, activation.gelu_and_mul, activation.gelu_tanh_and_mul),
    rope=Rope(rope.rope, rope.interleaved_rope),
    kv=KV(append=kv.append, append_latent=kv.append_latent),
    sampling=Sampling(**{name: getattr(sampling, name) for name in sampling.__all__}),
    state=State(state.conv, state.short_conv, state.gated_delta, state.ssd, state.gated_norm),
)
HERE = {name for name, op in FAST if op is not dict(REFERENCE)[name]}
RUNS = [
    (case, dtype) for case in CASES if case.op in HERE for dtype in case.tolerances if GPU or dtype == torch.float32
]


@pytest.mark.parametrize(
    ("case", "dtype"), one_of_each(RUNS, lambda run: run[0].op, lambda run: f"{run[0]}-{run[1]}", slow=not GPU)
)
def test_op_equals_reference(case: Case, dtype: torch.dtype) -> None:
    arguments = dict(case.make(torch.Generator().manual_seed(7), dtype))
    expected = call_op(case, dict(REFERENCE)[case.op], {k: copy_to(v, "cpu", wide=True) for k, v in arguments.items()})
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN
    try:
        found = call_op(case, dict(FAST)[case.op], {name: copy_to(value, DEVICE) for name, value in arguments.items()})
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        if not other.is_floating_point():
            assert torch.equal(one.cpu(), other)
            continue
        finite = other[other.isfinite()]
        tolerance = case.tolerances[dtype] * max(finite.abs().max().item() if finite.numel() else 1.0, 1e-6)
        torch.testing.assert_close(one.cpu().double(), other.double(), rtol=0.0, atol=tolerance)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(logits: torch.Tensor, how: Draws) -> list[int]:
    return FAST.sampling.draw(logits.to(DEVICE), copy_to(how, DEVICE)).tolist()


@pytest.mark.parametrize("shape", one_of_each(SHAPES, lambda _: "", slow=not GPU))
@pytest.mark.parametrize("filters", FILTERS, ids=lambda filters: "-".join(filters) or "plain")
def test_draws_equal_the_oracle(shape: str, filters: dict[str, Any]) -> None:
    rows = 5 if GPU else 2
    logits = SHAPES[shape](numbers(rows, VOCAB, seed=3))
    how = draws(rows, **filters)
    assert drawn(logits, how) == [expected_token(logits, how, row) for row in range(rows)]


def random_draws(rng: np.random.Generator, rows: int, vocab: int) -> Draws:
    """Sampling parameters with random filters for each row."""

    def column(values: Any, off: float, share_on: float) -> torch.Tensor:
        return torch.from_numpy(np.where(rng.random(rows) < share_on, values, off).astype(np.float32))

    def bits() -> torch.Tensor:
        return torch.from_numpy(rng.integers(-(2**31), 2**31, rows).astype(np.int32))

    return Draws(
        temperature=column(rng.uniform(0.1, 3.0, rows), 0.0, 0.95),
        seed_low=bits(),
        seed_high=bits(),
        position=torch.from_numpy(rng.integers(0, 2**31, rows).astype(np.int32)),
        top_k=column(np.exp(rng.uniform(0, np.log(vocab + 50), rows)).astype(int), 0, 0.5).int(),
        top_p=column(rng.uniform(0.01, 1.0, rows), 1.0, 0.5),
        min_p=column(np.exp(rng.uniform(-8, 0, rows)), 0.0, 0.3),
        max_k=vocab,
    )


@pytest.mark.parametrize("seed", one_of_each(range(60 if GPU else 4), lambda _: "", slow=not GPU))
def test_random_settings_equal_the_oracle(seed: int) -> None:
    """720 rows on a GPU, each with its own filters."""
    rng = np.random.default_rng(seed)
    rows, vocab = (12, int(rng.integers(2, 9000))) if GPU else (4, int(rng.integers(2, 3000)))
    logits = numbers(rows, vocab, seed=seed) * rng.uniform(0.5, 6.0)
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2
    if seed % 4 == 1:
        logits[:, rng.random(vocab) < 0.7] = float("-inf")
        logits[:, rng.integers(vocab)] = 1.0
    how = random_draws(rng, rows, vocab)
    assert drawn(logits, how) == [expected_token(logits, how, row) for row in range(rows)]


@pytest.mark.parametrize("k", one_of_each([33, 1, 2, 7, 100, 598], lambda _: "", slow=not GPU))
def test_top_k_keeps_exactly_k_tokens(k: int) -> None:
    """All tokens have similar probabilities, so one token too many or too few is noticed soon."""
    rows, vocab = 8, 599
    logits = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(row)) for row in range(rows)])
    logits = 5.0 - logits * 1e-3
    how = draws(rows, top_k=k)
    assert drawn(logits, how) == [expected_token(logits, how, row) for row in range(rows)]


def test_nan_is_the_likeliest_token_with_any_filter() -> None:
    logits = numbers(2, 1000)
    logits[:, [999, 400]], logits[:, 2] = float("nan"), float("inf")
    for filters in FILTERS:
        assert drawn(logits.clone(), draws(2, **filters)) == [400, 400]
    assert FAST.sampling.greedy(logits.to(DEVICE)).tolist() == [400, 400]
    logits[:, [999, 400]] = 0.0
    for filters in FILTERS:
        assert drawn(logits.clone(), draws(2, **filters)) == [2, 2]
    logits = numbers(2, 3000)  # more than a program looks at
    logits[:, :2048] = float("nan")
    for filters in FILTERS:
        assert drawn(logits.clone(), draws(2, **filters)) == [0, 0]
    logits[:] = float("nan")
    assert drawn(logits, draws(2)) == [0, 0]


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("vocab", one_of_each([128, 1, 5, 5_303], lambda _: "", slow=not GPU))
def test_greedy_and_logprobs(rows: int, vocab: int) -> None:
    logits = numbers(rows, vocab + 3, seed=vocab).round(decimals=1)[:, :vocab] * 3  # rows lie apart
    tokens = torch.arange(rows) % vocab
    found_token = FAST.sampling.greedy(logits.to(DEVICE)).cpu()
    assert torch.equal(found_token, logits.argmax(-1))
    for k in (0, min(3, vocab), min(20, vocab)):
        found = FAST.sampling.logprobs(logits.to(DEVICE), tokens.to(DEVICE), k)
        expected = REFERENCE.sampling.logprobs(logits.double(), tokens, k)
        torch.testing.assert_close(found.chosen.cpu().double(), expected.chosen, rtol=0, atol=1e-5)
        assert torch.equal(found.top_tokens.cpu(), expected.top_tokens)
        torch.testing.assert_close(found.top.cpu().double(), expected.top, rtol=0, atol=1e-5)


def test_logprobs_of_a_row_with_nan_are_nan() -> None:
    logits = numbers(2, 300)
    logits[1, 7] = float("nan")
    found = FAST.sampling.logprobs(logits.to(DEVICE), torch.tensor([1, 2], device=DEVICE), 2)
    assert found.chosen[0].isfinite()
    assert found.chosen[1].isnan()
    assert found.top[1].isnan().all()


def test_entries_without_a_row_are_skipped() -> None:
    logits = numbers(2, 300).to(DEVICE)
    before = logits.clone()
    none = torch.tensor([-1, -1], device=DEVICE)
    ones = torch.ones(2, device=DEVICE)
    FAST.sampling.bias(logits, none, none, ones)
    FAST.sampling.penalise(logits, none, none, none, none, ones, ones, ones)
    FAST.sampling.mask(logits, none, torch.zeros(2, 10, dtype=torch.int32, device=DEVICE))
    assert torch.equal(logits, before)


def test_append_skips_slots_beyond_the_cache() -> None:
    qkv, pages = numbers(3, 4, 16).to(DEVICE), torch.zeros(2, 2, 4, 1, 16, device=DEVICE)
    cos = torch.ones(3, 8, device=DEVICE)
    slots = torch.tensor([-1, 5, 8], device=DEVICE)
    FAST.kv.append(qkv.clone(), cos, cos * 0, slots, Append(pages[0], pages[1], "neox"))
    written = pages.flatten(1, 2).cpu()
    assert torch.equal(written[:, 5], qkv[1, 2:].cpu().unsqueeze(1))
    assert (written[:, [0, 1, 2, 3, 4, 6, 7]] == 0).all()


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA devices report a wait for the device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, torch says
@pytest.mark.parametrize("rows", [1, 64])
def test_sampling_is_captured_and_replayed(rows: int) -> None:
    """No op synchronises with the host, and a replay reads the current values of the tensors."""
    logits = numbers(rows, 5_000).to(DEVICE)
    how = copy_to(draws(rows, top_k=40, top_p=0.9, min_p=0.01), DEVICE)
    tokens = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def work() -> tuple[torch.Tensor, ...]:
        found = FAST.sampling.logprobs(logits, tokens, 3)
        return (FAST.sampling.draw(logits, how), FAST.sampling.greedy(logits), *found)

    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    for seed in range(5):
        logits.copy_(numbers(rows, 5_000, seed=seed) * seed)
        how.position.add_(1)
        graph.replay()
        for one, other in zip(kept, work(), strict=True):
            assert torch.equal(one, other)
