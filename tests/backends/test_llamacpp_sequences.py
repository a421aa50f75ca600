"""Sequences of llama.cpp against a simulated cache: each row sees exactly the cells of its prefix."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from localllm.backends.llamacpp.sequences import PagedSequences, StateSequences
from localllm.engine.batch import Want
from localllm.engine.drafts import Drafter
from localllm.engine.engine import Engine
from localllm.engine.errors import RunnerFailed
from localllm.engine.request import Delta, Request
from localllm.engine.runner import CacheGroup, RunnerSpec

from .. import work
from ..engine.test_equal_outputs import ADAPTERS, assert_equal_to_solo, check_memory, prophet, requests_of
from ..engine.token_device import outputs
from .batches import Row, make_batch
from .cell_device import CellDevice, CellMemory, StateDevice

SPEC = RunnerSpec(
    vocab_size=96,
    max_tokens=32,
    max_rows=8,
    max_context=256,
    groups=(CacheGroup(4, 128),),
    max_paths=12,
    num_adapters=2,
    adapters_per_step=2,
)


def seeds(quick: int, count: int) -> list[Any]:
    """The seeds below `count`; those from `quick` on are slow tests."""
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= quick else ()) for seed in range(count)]


def check_cells(engine: Engine, device: CellDevice) -> None:
    """Assert that the cells in use are not more than the positions of the pages that the last batch had in use."""
    if device.has_streams:
        return
    [group] = engine._scheduler._cache._groups
    pages = group.num_pages - len(group.pool) + len(group.pool._freed)
    assert device.memory.num_used <= pages * group.page_size


def serve(
    device: CellDevice,
    requests: list[Request],
    seed: int,
    cancel: float = 0.0,
    join: float = 0.4,
    drafter: Drafter | None = None,
) -> tuple[list[Delta], Engine]:
    """Requests join at random times and may be cancelled at random times."""
    rng = random.Random(seed)
    engine = Engine(device, drafter=drafter)
    for adapter in ADAPTERS[1:3]:
        engine.register_adapter(adapter)
    deltas: list[Delta] = []
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and rng.random() < join:
            engine.submit(waiting.pop(0))
        if rng.random() < cancel:
            engine.cancel(f"r{rng.randrange(len(requests))}")
        deltas += engine.step()
        check_memory(engine)
        check_cells(engine, device)
    return deltas, engine


def random_spec(rng: random.Random) -> RunnerSpec:
    """Random limits, sometimes small: tokens of a step, pages, page size, paths."""
    rows = rng.randrange(1, 9)
    page_size = rng.choice([1, 2, 4, 8, 16])
    return replace(
        SPEC,
        max_rows=rows,
        max_tokens=rng.choice([3, 9, 32, 100]),
        groups=(CacheGroup(page_size, rng.choice([100, 150, 300, 600]) // page_size),),
        max_paths=rows + rng.choice([0, 1, 4, 60]),
    )


def doubled_requests(seed: int) -> list[Request]:
    """Requests, with some equal pairs whose rows compute equal pages."""
    requests = requests_of(seed, 24)
    first = [replace(each, id=f"r{24 + number}") for number, each in enumerate(requests_of(seed, 24)[:12])]
    pairs = zip(requests[:12], first, strict=True)
    return [each for pair in pairs for each in pair] + requests[12:]


@pytest.mark.parametrize("seed", seeds(8, 100))
def test_random_requests_equal_solo_runs(seed: int) -> None:
    rng = random.Random(seed)
    spec = random_spec(rng)
    device = CellDevice(spec, lazy=False)
    deltas, _ = serve(device, doubled_requests(seed), seed, cancel=0.1, join=rng.choice([0.2, 0.9]))
    assert_equal_to_solo(deltas, doubled_requests(seed), spec)


@pytest.mark.parametrize("seed", seeds(8, 100))
def test_random_requests_in_streams_equal_solo_runs(seed: int) -> None:
    """The streams of each step are consecutive, although requests end and are cancelled in any order."""
    rng = random.Random(seed)
    spec = random_spec(rng)
    device = CellDevice(spec, lazy=False, has_streams=True)
    deltas, engine = serve(device, doubled_requests(seed), seed, cancel=0.1, join=rng.choice([0.2, 0.9]))
    assert_equal_to_solo(deltas, doubled_requests(seed), spec)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("seed", seeds(2, 40))
def test_a_sliding_window_passes_no_cell(seed: int) -> None:
    """The device keeps all positions of a prefix, although its cache overwrites cells that a window of 5 has passed."""
    rng = random.Random(seed)
    spec = random_spec(rng)
    deltas, _ = serve(CellDevice(spec, lazy=False, window=5), doubled_requests(seed), seed, cancel=0.1)
    assert_equal_to_solo(deltas, doubled_requests(seed), spec)


@pytest.mark.parametrize("seed", seeds(2, 40))
def test_rejected_drafts_leave_no_cells(seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(random_spec(rng), max_drafts=5)
    requests = requests_of(seed, 16)
    drafter = prophet(requests_of(seed, 16), spec, seed, acceptance=0.7)
    deltas, _ = serve(CellDevice(spec, lazy=False), requests, seed, drafter=drafter)
    assert_equal_to_solo(deltas, requests_of(seed, 16), spec)


@pytest.mark.parametrize("has_streams", [False, True])
@pytest.mark.parametrize("seed", seeds(2, 40))
def test_lost_steps_leave_no_cells(seed: int, has_streams: bool) -> None:
    rng = random.Random(seed)
    spec = random_spec(rng)
    device = CellDevice(spec, lazy=False, has_streams=has_streams, lost_steps=frozenset(rng.sample(range(0, 60, 2), 6)))
    deltas, _ = serve(device, requests_of(seed, 30), seed)
    assert sum(delta.finish == "no_memory" for delta in deltas) > 0
    texts = outputs(deltas)
    kept = [delta.request_id for delta in deltas if delta.finish not in (None, "no_memory")]
    requests = [each for each in requests_of(seed, 30) if each.id in kept]
    assert_equal_to_solo([delta for delta in deltas if delta.request_id in kept], requests, spec)
    assert set(texts) == {f"r{number}" for number in range(30)}


def test_more_cached_prompts_than_sequences() -> None:
    """Only the paths that were used last stay cached."""
    device = CellDevice(SPEC, lazy=False)
    engine = Engine(device)

    def cached(number: int) -> int:
        engine.submit(Request("r", (number,) * 9, 1))
        while engine.has_work:
            deltas = engine.step()
        return deltas[-1].cached

    assert [cached(number) for number in range(40)] == [0] * 40
    assert [cached(number) for number in range(39, 29, -1)] == [8] * 10
    assert cached(0) == 0


def test_a_second_engine_begins_with_free_pages() -> None:
    device = CellDevice(SPEC, lazy=False)
    for _ in range(2):
        requests = [Request(f"r{number}", (number,) * 20, 4) for number in range(20)]
        deltas, _ = serve(device, requests, 0)
        assert_equal_to_solo(deltas, requests, SPEC)


def test_a_new_prompt_shares_the_cells_of_its_prefix() -> None:
    device = CellDevice(SPEC, lazy=False)
    engine = Engine(device)
    stem = tuple(range(40))
    for number in range(6):
        engine.submit(Request(f"r{number}", (*stem, 50 + number), 8))
        engine.step()
    assert engine.stats().running == 6
    assert device.memory.num_used < 40 + 6 * 12
    assert device.memory.members[device.memory.positions < 40].sum() > 6 * 36


def test_a_replaced_page_gives_its_cells_back() -> None:
    """Two rows computed the same page, and each has begun another page."""
    memory = CellMemory(64, 4)
    sequences = PagedSequences(memory, 4, 4)
    prompt = np.arange(6)
    first = make_batch([Row(prompt, 0, [1, 2]), Row(prompt, 0, [3, 4])], 96)
    for sequence in sequences.place(first).tolist():
        memory.write([sequence], prompt, np.stack([prompt, prompt], axis=1))
    second = make_batch([Row([6], 6, [1, 2]), Row([7], 6, [1, 4])], 96)
    second = replace(second, freed_pages=(np.array([(3, 1)], np.int32),))
    rows = sequences.place(second).tolist()
    assert memory.num_used == 4 + 2 + 2
    for sequence in rows:
        cells = memory.cells(sequence)
        assert memory.positions[cells].tolist() == memory.tokens[cells, 0].tolist() == prompt.tolist()


def test_a_page_that_no_sequence_has_is_an_error() -> None:
    sequences = PagedSequences(CellMemory(64, 4), 4, 4)
    with pytest.raises(RunnerFailed, match="page 3"):
        sequences.place(make_batch([Row([1], 8, [2, 3, 4])], 96))


def test_more_paths_than_sequences_are_an_error() -> None:
    memory = CellMemory(64, 2)
    sequences = PagedSequences(memory, 4, 2)
    for page in (1, 2):
        sequences.place(make_batch([Row([1], 0, [page])], 96))
    with pytest.raises(RunnerFailed, match="all sequences"):
        sequences.place(make_batch([Row([1], 0, [3])], 96))


def test_states_are_sequences_that_begin_empty() -> None:
    memory = CellMemory(64, 4)
    sequences = StateSequences(memory, 4)
    memory.write([2], np.arange(3), np.zeros((3, 2)))
    memory.write([1], np.arange(5), np.zeros((5, 2)))
    batch = replace(make_batch([Row([1], 0, [0], Want.TOKEN), Row([1], 5, [0])], 96), states=np.array([2, 1], np.int32))
    assert sequences.place(batch).tolist() == [2, 1]
    assert len(memory.cells(2)) == 0
    assert len(memory.cells(1)) == 5


STATES = RunnerSpec(
    vocab_size=96,
    max_tokens=32,
    max_rows=4,
    max_context=256,
    num_states=4,
    num_snapshots=3,
    snapshot_interval=8,
    num_adapters=2,
    adapters_per_step=2,
)


@pytest.mark.parametrize("seed", seeds(2, 40))
def test_snapshots_of_states_are_copies_of_sequences(seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(STATES, num_snapshots=rng.randrange(5), snapshot_interval=rng.choice([1, 4, 16]))
    engine = Engine(StateDevice(spec, lazy=False))
    for adapter in ADAPTERS[1:3]:
        engine.register_adapter(adapter)
    deltas: list[Delta] = []
    waiting = doubled_requests(seed)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.submit(waiting.pop(0))
        if rng.random() < 0.05:
            engine.cancel(f"r{rng.randrange(36)}")
        deltas += engine.step()
    assert_equal_to_solo(deltas, doubled_requests(seed), spec)
    assert (engine.stats().prefix_hit_tokens > 0) == (spec.num_snapshots > 0)


@pytest.mark.parametrize("seed", range(20))
def test_states_are_copied_as_if_all_at_once(seed: int) -> None:
    """Chains, cycles, and several targets of one source."""
    rng = np.random.default_rng(seed)
    memory = CellMemory(64, 6)
    sequences = StateSequences(memory, 6)
    for sequence in range(6):
        memory.write([sequence], np.arange(sequence + 1), np.zeros((sequence + 1, 2)))
    targets = rng.permutation(6)[: rng.integers(1, 7)]
    sources = rng.integers(0, 6, len(targets))
    expected = np.arange(6)
    expected[targets] = sources
    copies = np.stack([sources, targets], axis=1)
    batch = make_batch([Row([1], 9, [0])] * 6, 96)
    placed = sequences.place(replace(batch, state_copies=copies, states=np.arange(6, dtype=np.int32)))
    assert [len(memory.cells(sequence)) - 1 for sequence in placed] == expected.tolist()


class Ignored:
    """A memory that does nothing, to count the work of the decisions."""

    def remove(self, sequence: int, start: int, end: int) -> None:
        pass

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        pass


def test_the_work_of_a_decode_step_is_that_of_its_rows() -> None:
    """The work does not grow with the length of the rows."""
    sequences = PagedSequences(Ignored(), 16, 256)
    pages = [range(1 + 128 * row, 129 + 128 * row) for row in range(64)]
    batches = [make_batch([Row([1], start, pages[row]) for row in range(64)], 96) for start in range(1000, 1064)]
    sequences.place(make_batch([Row([1] * 1000, 0, pages[row]) for row in range(64)], 96))
    counts = [work.steps(partial(sequences.place, batch)) for batch in batches]
    assert max(counts) < 64 * 80
