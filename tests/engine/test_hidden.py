"""Requests for hidden states: prefill only, one vector, beside requests for tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from localllm.engine.batch import Batch, Want
from localllm.engine.engine import Engine
from localllm.engine.errors import ContextOverflow, EngineError, RequestRefused
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult

from .test_equal_outputs import WITH_ADAPTERS, Modulo, assert_equal_to_solo, prophet, requests_of, serve
from .token_device import SPEC, TokenDevice, digest, finish_all, logits_of, outputs


def hidden(name: str, prompt: tuple[int, ...], **fields: object) -> Request:
    return Request(name, prompt, 0, wants_hidden=True, **fields)  # type: ignore[arg-type]


def mixed(seed: int, count: int) -> list[Request]:
    """Requests; about half of them return a hidden state."""
    rng = random.Random(seed)
    return [
        hidden(each.id, each.prompt, adapter=each.adapter) if rng.random() < 0.5 else each
        for each in requests_of(seed, count)
    ]


SPECS = {
    "room": WITH_ADAPTERS,
    "chunks": replace(WITH_ADAPTERS, max_tokens=7),
    "short of memory": replace(WITH_ADAPTERS, groups=(CacheGroup(4, 40),), max_rows=30),
    "window": replace(WITH_ADAPTERS, groups=(CacheGroup(4, 60), CacheGroup(2, 120, window=8))),
    "states": replace(WITH_ADAPTERS, groups=(), num_states=8, num_snapshots=6),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cancel", [0.0, 0.3])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_hidden_states_and_tokens_in_one_batch_equal_solo_runs(spec: RunnerSpec, cancel: float, overlap: bool) -> None:
    spec = replace(spec, overlap=overlap)
    deltas, _ = serve(spec, mixed(1, 30), 1, cancel)
    assert_equal_to_solo(deltas, mixed(1, 30), spec)
    vectors = [delta for delta in deltas if delta.hidden is not None]
    assert vectors
    assert all(delta.finish == "stop" and not delta.tokens for delta in vectors)


def test_drafts_beside_hidden_states() -> None:
    spec = replace(WITH_ADAPTERS, max_drafts=4, overlap=True)
    chats = [each for each in mixed(2, 20) if not each.wants_hidden]
    deltas, _ = serve(spec, mixed(2, 20), 2, drafter=prophet(chats, spec, 2, 0.8))
    assert_equal_to_solo(deltas, mixed(2, 20), spec)


@pytest.mark.parametrize("overlap", [False, True])
def test_hidden_state_is_that_of_the_last_token(overlap: bool) -> None:
    device = TokenDevice(replace(SPEC, overlap=overlap, max_tokens=8))
    engine = Engine(device)
    prompt = tuple(range(20))
    engine.submit(hidden("r", prompt))
    [delta] = finish_all(engine)
    context = np.array(prompt)
    expected = logits_of([digest(context, np.arange(20), np.zeros(20))], SPEC.vocab_size)[:4]
    assert delta.hidden is not None
    assert delta.hidden.tolist() == expected.tolist()
    assert delta.hidden.base is None, "the vector must not keep the array of the step"
    assert [batch.wants.tolist() for batch in device.batches] == [[Want.NOTHING], [Want.NOTHING], [Want.HIDDEN]]
    stats = engine.stats()
    assert (stats.tokens_in, stats.tokens_out, stats.cache_used) == (20, 0, 0)


def test_last_token_is_computed_again_after_a_prefix_hit() -> None:
    engine = Engine(TokenDevice(SPEC))
    results = []
    for _ in range(2):
        engine.submit(hidden("r", tuple(range(20))))
        [delta] = finish_all(engine)
        results.append((delta.cached, outputs([delta])))
    assert [cached for cached, _ in results] == [0, 19]
    assert results[0][1] == results[1][1]


def test_prompt_may_fill_the_context() -> None:
    engine = Engine(TokenDevice(SPEC))
    engine.submit(hidden("r", (1,) * SPEC.max_context))
    [delta] = finish_all(engine)
    assert delta.finish == "stop"
    with pytest.raises(ContextOverflow):
        engine.submit(hidden("r", (1,) * (SPEC.max_context + 1)))


def test_request_for_a_hidden_state_draws_no_tokens() -> None:
    for fields in ({"max_tokens": 1}, {"max_tokens": 0, "grammar": Modulo(1, 2)}):
        with pytest.raises(ValueError, match="draws no tokens"):
            Request("r", (1,), wants_hidden=True, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens"):
        Request("r", (1,), 0)


def test_runner_without_hidden_states_refuses_the_request() -> None:
    engine = Engine(TokenDevice(replace(SPEC, hidden_size=0)))
    with pytest.raises(RequestRefused, match="returns no hidden states of this model"):
        engine.submit(hidden("r", (1, 2)))


class Silent(TokenDevice):
    def compute(self, batch: Batch) -> StepResult:
        return replace(super().compute(batch), hidden=None)


def test_backend_without_hidden_states_is_an_error() -> None:
    engine = Engine(Silent(SPEC))
    engine.submit(hidden("r", (1, 2)))
    with pytest.raises(EngineError, match="no hidden states"):
        finish_all(engine)


def test_sampling_of_other_rows_stays_theirs() -> None:
    """The arrays of sampling parameters count the samples of rows with hidden states."""
    device = TokenDevice(SPEC)
    engine = Engine(device)
    engine.submit(hidden("h", (1, 2)))
    engine.submit(Request("t", (3, 4), 1, Sampling(temperature=0.5, top_k=7, seed=9)))
    finish_all(engine)
    [batch] = device.batches
    assert batch.wants.tolist() == [Want.HIDDEN, Want.TOKEN]
    assert batch.sampling.top_k.tolist() == [0, 7]
    assert batch.sampling.logprobs.tolist() == [-1, -1]
