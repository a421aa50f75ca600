"""Caches of every shape: groups with other page sizes, windows, states. Each request has the same output as alone."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from localllm.engine.engine import Engine
from localllm.engine.errors import EngineError
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec
from localllm.engine.sampling import candidates, draw

from .test_drafts import Script
from .test_equal_outputs import WITH_ADAPTERS, assert_equal_to_solo, prophet, requests_of, serve
from .token_device import TokenDevice, digest, finish_all, logits_of, next_state, outputs, solo


def shape(*groups: CacheGroup, states: int = 0, snapshots: int = 0, interval: int = 0) -> RunnerSpec:
    return replace(WITH_ADAPTERS, groups=groups, num_states=states, num_snapshots=snapshots, snapshot_interval=interval)


SHAPES = {
    "unlike pages": shape(CacheGroup(4, 128), CacheGroup(3, 180)),
    "window": shape(CacheGroup(4, 128), CacheGroup(2, 128, window=7)),
    "window of one": shape(CacheGroup(4, 128), CacheGroup(4, 128, window=1)),
    "large pages in the window": shape(CacheGroup(2, 200), CacheGroup(8, 40, window=20)),
    "windows alone": shape(CacheGroup(4, 128, window=9), CacheGroup(4, 128, window=30)),
    "states": shape(states=8, snapshots=20, interval=8),
    "states without snapshots": shape(states=3),
    "pages and states": shape(CacheGroup(4, 128), states=8, snapshots=12),
    "everything": shape(
        CacheGroup(4, 128), CacheGroup(2, 200, window=12), CacheGroup(8, 64), states=8, snapshots=9, interval=16
    ),
}
SMALL = {
    "unlike pages": shape(CacheGroup(4, 40), CacheGroup(3, 45)),
    "window": shape(CacheGroup(4, 40), CacheGroup(2, 36, window=7)),
    "windows alone": shape(CacheGroup(4, 18, window=9), CacheGroup(4, 30, window=30)),
    "states": shape(states=3, snapshots=2, interval=8),
    "everything": shape(
        CacheGroup(4, 36), CacheGroup(2, 50, window=12), CacheGroup(8, 16), states=6, snapshots=2, interval=16
    ),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_plenty_of_room(name: str, overlap: bool) -> None:
    spec = replace(SHAPES[name], overlap=overlap)
    deltas, engine = serve(spec, requests_of(0, 20), 0)
    assert_equal_to_solo(deltas, requests_of(0, 20), spec)
    assert (engine.stats().prefix_hit_tokens > 0) == (name != "states without snapshots")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SMALL)
def test_small_caches_and_cancelling(name: str, seed: int, overlap: bool) -> None:
    spec = replace(SMALL[name], overlap=overlap, max_rows=20)
    deltas, engine = serve(spec, requests_of(seed, 30), seed, cancel=0.1)
    assert_equal_to_solo(deltas, requests_of(seed, 30), spec)
    assert engine.stats().preemptions > 0 or name == "states"


@pytest.mark.parametrize("name", ["unlike pages", "window", "large pages in the window", "windows alone"])
def test_drafts_fit_pages_of_every_shape(name: str) -> None:
    spec = replace(SHAPES[name], overlap=True, max_drafts=4)
    drafter = prophet(requests_of(2, 12), spec, 2, 0.7)
    deltas, _ = serve(spec, requests_of(2, 12), 2, drafter=drafter)
    assert_equal_to_solo(deltas, requests_of(2, 12), spec)


@pytest.mark.parametrize("max_tokens", [1, 3, 7])
def test_chunks_of_any_size(max_tokens: int) -> None:
    spec = replace(SHAPES["everything"], max_tokens=max_tokens)
    deltas, _ = serve(spec, requests_of(3, 8), max_tokens)
    assert_equal_to_solo(deltas, requests_of(3, 8), spec)


def test_expected_tokens_by_hand() -> None:
    """Computes the expected tokens by hand: a group without a window, a group with one, and a state."""
    spec = shape(CacheGroup(4, 128), CacheGroup(2, 128, window=3), states=2)
    request = Request("r", (5, 6, 7), 12, Sampling(temperature=0.9, top_k=30, seed=77))
    device = TokenDevice(spec)
    engine = Engine(device)
    engine.submit(request)
    finish_all(engine)
    tokens = list(request.prompt)
    for step in range(12):
        context, positions, none = np.array(tokens), np.arange(len(tokens)), np.zeros(len(tokens), int)
        state = np.zeros(1, np.uint32)
        for token in tokens:
            state = next_state(state, token, 0)
        window = digest(context[-3:], positions[-3:], none[-3:], len(tokens) - 3)
        logits = logits_of([digest(context, positions, none), window, state], spec.vocab_size)
        sampling = device.batches[step].sampling
        tokens.append(draw(candidates(logits, sampling, 0, None), sampling, 0))
    assert solo(request, spec) == tuple(tokens[3:])


def test_a_second_turn_computes_only_what_follows_the_last_snapshot() -> None:
    spec = shape(CacheGroup(4, 128), states=2, snapshots=4)
    device = TokenDevice(spec)
    engine = Engine(device)
    first = Request("first", tuple(range(18)), 7)
    engine.submit(first)
    answer = outputs(finish_all(engine))["first"]
    assert [batch.num_tokens for batch in device.batches[:3]] == [16, 2, 1]
    second = Request("second", (*first.prompt, *answer, 1, 2), 4)
    engine.submit(second)
    deltas = finish_all(engine)
    assert {delta.cached for delta in deltas} == {24}
    assert outputs(deltas)["second"] == solo(second, spec)


def test_equal_prompts_with_states_are_computed_once() -> None:
    spec = replace(SHAPES["pages and states"], max_tokens=64)
    same = [Request(f"r{number}", tuple(range(40)), 5, Sampling(1.0, seed=number)) for number in range(4)]
    device = TokenDevice(spec)
    engine = Engine(device)
    for each in same:
        engine.submit(each)
    assert outputs(finish_all(engine)) == {each.id: solo(each, spec) for each in same}
    assert sum(batch.num_tokens for batch in device.batches) <= 40 + 3 * 4 + 4 * 4


def test_a_prefix_shorter_than_a_snapshot_interval_does_not_wait() -> None:
    spec = replace(SHAPES["pages and states"], max_tokens=64)
    requests = [Request("long", tuple(range(33)), 5), Request("other", (*range(10), 50), 5)]
    device = TokenDevice(spec)
    engine = Engine(device)
    for each in requests:
        engine.submit(each)
    assert outputs(finish_all(engine)) == {each.id: solo(each, spec) for each in requests}
    assert device.batches[0].num_rows == 2


def test_a_long_sequence_lives_in_a_small_window() -> None:
    """Longer than all pages of the window's group."""
    spec = replace(shape(CacheGroup(4, 64), CacheGroup(4, 14, window=9)), max_tokens=32)
    requests = [
        Request(f"r{number}", tuple(random.Random(number).choices(range(96), k=200)), 50) for number in range(2)
    ]
    deltas, engine = serve(spec, requests, 1)
    assert_equal_to_solo(deltas, requests, spec)
    assert engine.stats().cache_used == 0


def test_states_take_no_drafts() -> None:
    with pytest.raises(EngineError, match="recurrent states cannot undo"):
        Engine(TokenDevice(replace(SHAPES["states"], max_drafts=2)), drafter=Script([]))
