"""Drafts change no output, whatever is accepted; and they are verified, not drawn one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from localllm.engine.batch import Batch
from localllm.engine.drafts import follow, usable
from localllm.engine.engine import Engine
from localllm.engine.errors import EngineError
from localllm.engine.history import TokenHistory
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult

from .test_equal_outputs import (
    SAMPLINGS,
    WITH_ADAPTERS,
    Modulo,
    assert_equal_to_solo,
    prophet,
    requests_of,
    serve,
)
from .token_device import SPEC, TokenDevice, finish_all, outputs, solo

DRAFTING = replace(WITH_ADAPTERS, max_drafts=4)


@dataclass
class Script:
    """A drafter that proposes the next tokens of one text."""

    text: list[int]
    limits: list[int] = field(default_factory=list)

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        self.limits.append(limit)
        return self.text[len(tokens) : len(tokens) + limit] if self.text[: len(tokens)] == tokens else []


def run(request: Request, drafter: object, spec: RunnerSpec = DRAFTING) -> tuple[list[Delta], TokenDevice]:
    device = TokenDevice(spec)
    engine = Engine(device, drafter=drafter)  # type: ignore[arg-type]
    engine.submit(request)
    return finish_all(engine), device


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_outputs_equal_those_without_drafts(seed: int, acceptance: float, overlap: bool) -> None:
    spec = replace(DRAFTING, overlap=overlap)
    drafter = prophet(requests_of(seed, 20), spec, seed, acceptance)
    deltas, engine = serve(spec, requests_of(seed, 20), seed, drafter=drafter)
    assert_equal_to_solo(deltas, requests_of(seed, 20), spec)
    assert engine.stats().prefix_hit_tokens > 0
    assert engine.stats().tokens_out == sum(len(delta.tokens) for delta in deltas)
    assert max(len(delta.tokens) for delta in deltas) == 5 or acceptance < 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_preemption_and_cancelling_with_drafts_in_flight(seed: int, overlap: bool) -> None:
    spec = replace(DRAFTING, overlap=overlap, groups=(CacheGroup(4, 28),), max_rows=20)
    drafter = prophet(requests_of(seed, 30), spec, seed, 0.7)
    deltas, engine = serve(spec, requests_of(seed, 30), seed, cancel=0.1, drafter=drafter)
    assert_equal_to_solo(deltas, requests_of(seed, 30), spec)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_drafts_fit_into_small_steps(max_tokens: int) -> None:
    spec = replace(DRAFTING, max_tokens=max_tokens)
    drafter = prophet(requests_of(3, 8), spec, 3, 0.8)
    deltas, _ = serve(spec, requests_of(3, 8), max_tokens, drafter=drafter)
    assert_equal_to_solo(deltas, requests_of(3, 8), spec)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_accepted_drafts_come_together_with_their_logprobs(sampling: Sampling) -> None:
    request = Request("r", (5, 6, 7), 12, replace(sampling, logprobs=2))
    alone, _ = run(request, None)
    deltas, device = run(request, Script([*request.prompt, *solo(request)]))
    assert [len(delta.tokens) for delta in deltas] == [5, 5, 2]
    assert len(device.batches) == 3
    assert [entry for delta in deltas for entry in delta.logprobs] == [
        entry for delta in alone for entry in delta.logprobs
    ]


def test_wrong_drafts_cost_no_token_and_their_positions_are_computed_again() -> None:
    request = Request("r", (5, 6, 7), 10)
    text = [*request.prompt, *solo(request)]
    text[6] = (text[6] + 1) % 96  # the third draft of the first step
    deltas, device = run(request, Script(text))
    assert outputs(deltas)["r"] == solo(request)
    assert len(deltas[0].tokens) == 4
    assert device.batches[1].positions[0] == 6


def test_a_stop_id_ends_the_request_within_accepted_drafts() -> None:
    tokens = solo(Request("r", (5, 6, 7), 12))
    stop = next(token for token in tokens[2:] if tokens.index(token) >= 2)
    request = Request("r", (5, 6, 7), 12, stop_ids=frozenset({stop}))
    deltas, device = run(request, Script([5, 6, 7, *tokens]))
    end = tokens.index(stop) + 1
    assert outputs(deltas)["r"] == tokens[:end]
    assert deltas[-1].finish == "stop"
    assert all(stop not in batch.tokens for batch in device.batches), "no answer after a stop id is needed"


def test_a_grammar_ends_within_accepted_drafts() -> None:
    request = Request("r", (5, 6, 7), 30, SAMPLINGS[1], grammar=Modulo(1, 7))
    tokens = solo(replace(request, grammar=Modulo(1, 7)))
    assert len(tokens) == 7
    deltas, device = run(request, Script([5, 6, 7, *tokens, 1, 2, 3]))
    assert outputs(deltas)["r"] == tokens
    assert [len(delta.tokens) for delta in deltas] == [5, 2]
    assert [len(batch.masks) for batch in device.batches] == [5, 2]


def test_the_last_token_by_length_is_never_a_draft() -> None:
    request = Request("r", (5, 6, 7), 3)
    script = Script([5, 6, 7, *solo(request), 1, 2, 3])
    deltas, device = run(request, script)
    assert script.limits == [2]
    assert [delta.tokens for delta in deltas] == [solo(request)]
    assert device.batches[0].num_tokens == 5


@dataclass
class Late(Script):
    """Proposes nothing at the end of a prompt of two tokens."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        return [7] * limit if len(tokens) > 2 else []


def test_drafts_take_no_token_of_a_younger_sequence() -> None:
    spec = replace(DRAFTING, max_tokens=10)
    requests = [Request(f"r{number}", (number, 6), 9) for number in range(5)]
    device = TokenDevice(spec)
    engine = Engine(device, drafter=Late([]))
    for each in requests:
        engine.submit(each)
    deltas = finish_all(engine)
    assert outputs(deltas) == {each.id: solo(each) for each in requests}
    assert [batch.num_rows for batch in device.batches[:5]] == [5] * 5
    assert device.batches[1].drafts.tolist() == [4, 1, 0, 0, 0]


def test_a_row_with_drafts_waits_for_its_commit_and_others_overlap() -> None:
    drafted = Request("drafted", (5, 6, 7), 12)
    plain = Request("plain", (8, 9), 12)
    device = TokenDevice(replace(DRAFTING, overlap=True))
    engine = Engine(device, drafter=Script([5, 6, 7, *solo(drafted)]))
    engine.submit(drafted)
    engine.submit(plain)
    deltas = finish_all(engine)
    assert outputs(deltas) == {each.id: solo(each) for each in (drafted, plain)}
    assert [batch.drafts.tolist() for batch in device.batches[:4]] == [[4, 0], [0], [4, 0], [0]]
    assert [batch.carry.tolist() for batch in device.batches[:4]] == [[-1, -1], [1], [-1, 0], [1]]


def test_a_runner_without_drafts_refuses_a_drafter() -> None:
    with pytest.raises(EngineError, match="verifies no drafts"):
        Engine(TokenDevice(SPEC), drafter=Script([]))


@pytest.mark.parametrize(("change", "error"), [("more", "drew 6 tokens for a row"), ("other", "different token")])
def test_a_backend_that_verifies_wrongly_is_named(change: str, error: str) -> None:
    class Wrong(TokenDevice):
        def compute(self, batch: Batch) -> StepResult:
            result = super().compute(batch)
            if change == "more":
                return StepResult(np.append(result.tokens, np.int32(1)), result.row_starts + np.array([0, 1], np.int32))
            return StepResult((result.tokens + 1) % 96, result.row_starts)

    request = Request("r", (5, 6, 7), 12)
    engine = Engine(Wrong(DRAFTING), drafter=Script([*request.prompt, *solo(request)]))
    engine.submit(request)
    with pytest.raises(EngineError, match=error):
        finish_all(engine)


def test_drafts_end_before_a_stop_id_and_before_an_id_outside_the_vocabulary() -> None:
    assert usable([1, 2, 3], frozenset(), 10) == (1, 2, 3)
    assert usable([1, 2, 3], frozenset({2}), 10) == (1,)
    assert usable([1, 10, 3], frozenset(), 10) == (1,)
    assert usable([-1], frozenset(), 10) == ()


def test_drafts_that_the_grammar_forbids_are_left_out() -> None:
    grammar = Modulo(1, 3)
    drafts, masks = follow(grammar, grammar.allowed(), (0, 3, 4), 96)
    assert drafts == (0,)  # 3 is 0 modulo 3, and 1 must follow
    assert len(masks) == 1
    assert grammar.taken == []
    assert follow(grammar, grammar.allowed(), (0, 1, 2), 96)[0] == (0, 1), "the third would end the text"


def test_a_grammar_that_fails_on_a_draft_keeps_the_drafts_before() -> None:
    class Fragile(Modulo):
        def accept(self, token: int) -> None:
            super().accept(token)
            if len(self.taken) == 2:
                raise RuntimeError("too complex")

    assert follow(Fragile(1, 9), Fragile(1, 9).allowed(), (0, 1, 2), 96)[0] == (0,)


def test_a_history_after_drafts_equals_one_that_took_them_in() -> None:
    history = TokenHistory([1, 2, 2, 5])
    history.add(7)
    expected = TokenHistory([1, 2, 2, 5])
    for token in (7, 2, 9, 9, 7):
        expected.add(token)
    assert (history.after([2, 9, 9, 7]) == expected.table).all()
    assert history.table.shape[1] == 4, "the history itself stays"
