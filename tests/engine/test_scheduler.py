"""The decisions of the scheduler, step by step. test_equal_outputs.py tests the tokens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from localllm.engine.batch import Batch, Want
from localllm.engine.engine import Engine
from localllm.engine.errors import CacheOverflow, ContextOverflow, EngineError, RequestRefused
from localllm.engine.lora import Adapter
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import CacheGroup, RunnerSpec, StepResult

from .token_device import SPEC, TokenDevice, finish_all, outputs, solo

A, B, C = (Adapter(name, f"/{name}", "1") for name in "abc")
ADAPTERS = replace(SPEC, num_adapters=2, adapters_per_step=2)


def request(name: str, length: int, max_tokens: int = 4, **more: object) -> Request:
    start = sum(name.encode())
    return Request(name, tuple((start * 7 + at * 5) % SPEC.vocab_size for at in range(length)), max_tokens, **more)  # type: ignore[arg-type]


def engine_of(*requests: Request, spec: RunnerSpec = SPEC) -> tuple[Engine, TokenDevice]:
    device = TokenDevice(spec)
    engine = Engine(device)
    for adapter in (A, B, C):
        engine.register_adapter(adapter)
    for each in requests:
        engine.submit(each)
    return engine, device


def counts(batch: Batch) -> list[int]:
    return np.diff(batch.row_starts).tolist()


# Refused requests.


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_longer_than_the_context_is_refused_with_the_numbers(overlap: bool) -> None:
    engine, _ = engine_of(spec=replace(SPEC, overlap=overlap))
    with pytest.raises(ContextOverflow) as refusal:
        engine.submit(request("long", 200, 57))
    assert (refusal.value.needed, refusal.value.limit, refusal.value.prompt) == (257, 256, 200)
    assert not engine.has_work
    engine.submit(request("fits", 200, 56))
    assert len(outputs(finish_all(engine))["fits"]) == 56


def test_a_request_larger_than_all_memory_is_refused_with_both_numbers() -> None:
    engine, _ = engine_of(spec=replace(SPEC, groups=(CacheGroup(4, 10),)))
    with pytest.raises(CacheOverflow, match="41 tokens of KV cache, but the whole cache has 40") as refusal:
        engine.submit(request("large", 30, 11))
    assert (refusal.value.needed, refusal.value.limit) == (41, 40)
    engine.submit(request("fits", 30, 10))
    assert len(outputs(finish_all(engine))["fits"]) == 10


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    engine, _ = engine_of(request("a", 3))
    with pytest.raises(RequestRefused, match="'a' is running already"):
        engine.submit(request("a", 5))
    finish_all(engine)
    engine.submit(request("a", 5))
    assert engine.cancel("a")
    engine.submit(request("a", 6))
    assert outputs(finish_all(engine))["a"] == solo(request("a", 6))


@pytest.mark.parametrize("token", [-1, SPEC.vocab_size, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    engine, _ = engine_of()
    with pytest.raises(RequestRefused, match=f"token id {token} in prompt"):
        engine.submit(Request("a", (1, token), 4))
    with pytest.raises(RequestRefused, match=f"token id {token} in logit_bias"):
        engine.submit(Request("a", (1,), 4, Sampling(logit_bias=((3, 1.0), (token, 1.0)))))


def test_requests_with_unregistered_or_unsupported_adapters_are_refused() -> None:
    engine, _ = engine_of(spec=ADAPTERS)
    with pytest.raises(RequestRefused, match="'a' is not registered in this version"):
        engine.submit(request("x", 3, adapter=Adapter("a", "/a", "2")))
    with pytest.raises(RequestRefused, match="'z' is not registered"):
        engine.submit(request("x", 3, adapter=Adapter("z", "/z", "1")))
    engine, _ = engine_of()
    with pytest.raises(RequestRefused, match="runs no adapters"):
        engine.submit(request("x", 3, adapter=A))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_requests_without_prompt_or_room_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        Request("a", (), 4)
    with pytest.raises(ValueError, match="max_tokens"):
        Request("a", (1,), 0)


# The rows of a step.


def test_prompts_are_chunked_to_the_budget_that_running_rows_leave() -> None:
    engine, device = engine_of(request("a", 10), request("b", 50))
    finish_all(engine)
    assert [counts(batch) for batch in device.batches] == [[10, 22], [1, 28], [1, 1], [1, 1], [1]]
    assert device.batches[0].wants.tolist() == [Want.TOKEN, Want.NOTHING]
    assert device.batches[1].wants.tolist() == [Want.TOKEN, Want.TOKEN]
    assert device.batches[1].positions.tolist() == [10, *range(22, 50)]


def test_requests_start_in_order_and_the_first_blocks_the_others() -> None:
    small = replace(SPEC, groups=(CacheGroup(4, 12),))
    engine, device = engine_of(request("a", 20, 20), request("big", 30, 8), request("c", 1, 1), spec=small)
    deltas = finish_all(engine)
    ends = [delta.request_id for delta in deltas if delta.finish]
    assert ends == ["a", "c", "big"]  # c started after big, and is shorter
    assert all(batch.num_rows == 1 for batch in device.batches[:20])


def test_nobody_starves_under_constant_arrivals() -> None:
    engine, _ = engine_of(spec=replace(SPEC, groups=(CacheGroup(4, 16),), max_rows=4))
    waited: dict[str, int] = defaultdict(int)
    live: set[str] = set()
    for number in range(300):
        name = f"r{number}"
        engine.submit(request(name, 40 if number % 10 == 0 else 5, 8))
        live.add(name)
        for _ in range(3):
            for delta in engine.step():
                if delta.finish:
                    live.discard(delta.request_id)
            for each in live:
                waited[each] += 1
        if len(live) > 6:  # arrivals pause, as a daemon's admission limit would have it
            for delta in finish_all(engine):
                if delta.finish:
                    live.discard(delta.request_id)
    assert max(waited.values()) < 60


def test_no_more_rows_than_the_runner_has() -> None:
    engine, device = engine_of(*(request(f"r{n}", 2) for n in range(20)))
    deltas = finish_all(engine)
    assert max(batch.num_rows for batch in device.batches) == SPEC.max_rows
    assert len(outputs(deltas)) == 20


def test_more_rows_than_tokens_in_a_step() -> None:
    spec = replace(SPEC, max_tokens=3)
    engine, device = engine_of(*(request(f"r{n}", 2, 6) for n in range(6)), spec=spec)
    out = outputs(finish_all(engine))
    assert out == {f"r{n}": solo(request(f"r{n}", 2, 6)) for n in range(6)}
    assert max(batch.num_tokens for batch in device.batches) == 3


def test_state_slots_limit_the_running_sequences() -> None:
    spec = replace(SPEC, groups=(), num_states=2)
    engine, device = engine_of(*(request(f"r{n}", 5) for n in range(5)), spec=spec)
    out = outputs(finish_all(engine))
    assert max(batch.num_rows for batch in device.batches) == 2
    assert out == {f"r{n}": solo(request(f"r{n}", 5), spec) for n in range(5)}


def test_slots_refuse_by_the_length_of_one_slot() -> None:
    spec = replace(SPEC, groups=(), num_states=2)
    engine, _ = engine_of(spec=spec)
    with pytest.raises(ContextOverflow):
        engine.submit(request("a", 250, 10))


# Prefix hits and memory.


def test_a_second_turn_computes_only_what_is_new() -> None:
    engine, device = engine_of(request("first", 18))
    [answer] = outputs(finish_all(engine)).values()
    prompt = (*request("first", 18).prompt, *answer, 1, 2)
    before = len(device.batches)
    engine.submit(Request("second", prompt, 4))
    deltas = finish_all(engine)
    assert device.batches[before].num_tokens == 4  # 21 tokens had been computed, 20 of them fill pages
    assert {delta.cached for delta in deltas} == {20}
    assert outputs(deltas)["second"] == solo(Request("second", prompt, 4))
    stats = engine.stats()
    assert (stats.prefix_hit_tokens, stats.tokens_in, stats.tokens_out) == (20, 18 + 24, 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_that_fill_equal_pages_in_the_same_step_share_them(overlap: bool) -> None:
    twins = [replace(request("a", 3, 40), id=name) for name in ("one", "two")]  # shorter than a page: none waits
    engine, device = engine_of(*twins, spec=replace(SPEC, overlap=overlap))
    deltas = [delta for _ in range(20) for delta in engine.step()]
    assert counts(device.batches[0]) == [3, 3]
    first, second = device.batches[0].page_tables[0]
    assert not set(first) & set(second)
    first, second = next(batch.page_tables[0] for batch in device.batches if batch.context_lens[0] == 16)
    assert (first[:3] == second[:3]).all()  # the full pages are one now, the begun ones are not
    assert first[3] != second[3]
    other = request("other", 20, 30)
    engine.submit(other)  # gets the freed pages while the twins go on
    deltas += finish_all(engine)
    out = outputs(deltas)
    assert out["one"] == out["two"] == solo(twins[0])
    assert out["other"] == solo(other)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_tokens", [512, 60])
def test_equal_prompts_in_parallel_are_computed_once(max_tokens: int, overlap: bool) -> None:
    """The others wait a step for the pages that the first one's row is just computing."""
    spec = replace(SPEC, max_tokens=max_tokens, max_context=600, groups=(CacheGroup(4, 600),), overlap=overlap)
    same = [replace(request("a", 500, 10), id=f"same{n}", sampling=Sampling(1.0, seed=n)) for n in range(4)]
    behind = request("behind", 30, 10)
    engine, device = engine_of(*same, behind, spec=spec)
    deltas = finish_all(engine)
    assert outputs(deltas) == {each.id: solo(each, spec) for each in [*same, behind]}
    assert sum(batch.num_tokens for batch in device.batches) == 500 + 3 + 30 + 5 * 9
    first = -(-500 // max_tokens)  # steps that the first one's prompt takes
    assert device.batches[first].num_rows == 5  # all the others join in the next one


def test_only_sequences_with_the_same_first_page_wait_for_it() -> None:
    spec = replace(ADAPTERS, max_tokens=100)
    prompt = request("a", 20).prompt
    first = Request("first", prompt, 4)
    company = [
        Request("no full page is the same", (*prompt[:3], 1, 1, 1), 4),
        Request("the last token is always computed", prompt[:4], 4),
        Request("another adapter", prompt, 4, adapter=A),
    ]
    engine, device = engine_of(first, *company, spec=spec)
    deltas = finish_all(engine)
    assert counts(device.batches[0]) == [20, 6, 4, 20]
    assert outputs(deltas) == {each.id: solo(each, spec) for each in [first, *company]}
    engine, device = engine_of(first, Request("one page is the same", (*prompt[:4], 1), 4), spec=spec)
    finish_all(engine)
    assert [counts(batch) for batch in device.batches[:2]] == [[20], [1, 1]]


def test_slots_share_nothing_so_nobody_waits() -> None:
    spec = replace(SPEC, max_tokens=100, groups=(), num_states=2)
    engine, device = engine_of(request("a", 20), replace(request("a", 20), id="again"), spec=spec)
    finish_all(engine)
    assert counts(device.batches[0]) == [20, 20]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_takes_the_youngest_and_it_comes_back_first(overlap: bool) -> None:
    spec = replace(SPEC, groups=(CacheGroup(4, 12),), max_rows=2, overlap=overlap)
    requests = [request("old", 15, 30), request("young", 15, 12), request("late", 3, 1)]
    engine, device = engine_of(*requests, spec=spec)
    deltas = finish_all(engine)
    assert engine.stats().preemptions > 0
    assert [delta.request_id for delta in deltas if delta.finish] == ["old", "late", "young"]
    alone = [batch.num_rows for batch in device.batches].index(1)  # late does not overtake young, though it would fit
    assert all(batch.num_rows == 1 for batch in device.batches[alone : 30 - 1])
    assert outputs(deltas) == {each.id: solo(each) for each in requests}
    assert {delta.cached for delta in deltas} == {
        0
    }  # pages that a resumed request reuses do not count as cached prompt tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_page_that_the_last_step_filled_is_a_prefix_hit(overlap: bool) -> None:
    engine, _ = engine_of(request("first", 17), spec=replace(SPEC, overlap=overlap))
    [answer] = outputs(finish_all(engine)).values()
    engine.submit(Request("second", (*request("first", 17).prompt, *answer), 4))
    assert finish_all(engine)[0].cached == 20


def test_a_request_waits_without_new_attempts_until_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of(request("a", 20, 20), request("big", 30, 8), spec=replace(SPEC, groups=(CacheGroup(4, 12),)))
    cache, asked = engine._scheduler._cache, []
    opened = cache.open
    monkeypatch.setattr(cache, "open", lambda *args: (asked.append(args), opened(*args))[1])
    finish_all(engine)
    assert len(asked) == 3  # a; big, which fails; big again after the end of a


def test_a_request_that_waits_for_memory_has_no_adapter_slot() -> None:
    spec = replace(ADAPTERS, groups=(CacheGroup(4, 12),), num_adapters=1, adapters_per_step=1)
    engine, device = engine_of(request("a", 20, 20), request("big", 30, 8, adapter=A), spec=spec)
    for _ in range(3):
        engine.step()
    engine.cancel("big")
    engine.submit(request("b", 3, 1, adapter=B))
    assert finish_all(engine)[-1].finish == "length"
    assert device.loads == [(1, A), (1, B)]


def test_all_memory_is_released_at_the_end() -> None:
    engine, _ = engine_of(*(request(f"r{n}", 9) for n in range(9)), spec=replace(SPEC, groups=(CacheGroup(4, 20),)))
    finish_all(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_used, stats.cache_tokens) == (0, 0, 0, 80)


# The end of a request.


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_id_ends_it_and_is_the_last_token(overlap: bool) -> None:
    tokens = solo(request("a", 5, 40))
    stop = next(token for at, token in enumerate(tokens) if at > 3 and token not in tokens[:at])
    ends = replace(request("a", 5, 40), stop_ids=frozenset({stop}))
    engine, device = engine_of(ends, spec=replace(SPEC, overlap=overlap))
    deltas = finish_all(engine)
    length = tokens.index(stop) + 1
    assert outputs(deltas)["a"] == tokens[:length]
    assert [delta.finish for delta in deltas] == [None] * (length - 1) + ["stop"]
    assert len(device.batches) == length + overlap  # with overlap, the next step was already in flight


@pytest.mark.parametrize("overlap", [False, True])
def test_no_step_is_planned_after_the_last_token_by_length(overlap: bool) -> None:
    engine, device = engine_of(request("a", 5, 7), spec=replace(SPEC, overlap=overlap))
    deltas = finish_all(engine)
    assert [delta.finish for delta in deltas] == [None] * 6 + ["length"]
    assert len(device.batches) == 7


def test_a_stop_id_at_the_last_length_counts_as_stop() -> None:
    tokens = solo(request("a", 5, 3))
    engine, _ = engine_of(replace(request("a", 5, 3), stop_ids=frozenset({tokens[2]}) - set(tokens[:2])))
    assert finish_all(engine)[-1].finish == "stop"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_cancelled_request_frees_its_pages_and_ends_once(overlap: bool, after: int) -> None:
    engine, _ = engine_of(request("a", 40, 20), request("b", 9, 20), spec=replace(SPEC, overlap=overlap))
    deltas: list[Delta] = []
    for _ in range(after):
        deltas += engine.step()
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.cancel("nobody")
    used = engine.stats().cache_used
    assert used <= 28  # b's alone
    deltas += finish_all(engine)
    ends = [delta for delta in deltas if delta.finish]
    assert sorted((delta.request_id, delta.finish) for delta in ends) == [("a", "cancelled"), ("b", "length")]
    assert [delta for delta in deltas if delta.request_id == "a"][-1].finish == "cancelled"
    assert outputs(deltas)["b"] == solo(request("b", 9, 20))


def test_a_blocked_request_runs_after_a_cancellation() -> None:
    small = replace(SPEC, groups=(CacheGroup(4, 12),))
    engine, device = engine_of(request("a", 20, 20), request("big", 30, 8), request("c", 1, 1), spec=small)
    engine.step()
    engine.cancel("big")
    assert "c" in outputs(engine.step())
    assert device.batches[-1].num_rows == 2


# Adapters.


def test_rows_name_the_slot_of_their_adapter() -> None:
    engine, device = engine_of(
        request("x", 3, adapter=A),
        request("y", 3),
        request("z", 3, adapter=B),
        request("w", 3, adapter=A),
        spec=ADAPTERS,
    )
    out = outputs(finish_all(engine))
    assert device.batches[0].adapters.tolist() == [1, 0, 2, 1]
    assert device.loads == [(1, A), (2, B)]
    assert out == {
        name: solo(request(name, 3, adapter=a), ADAPTERS) for name, a in zip("xyzw", (A, None, B, A), strict=True)
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_a_third_adapter_waits_for_a_slot_and_all_outputs_are_right(overlap: bool) -> None:
    spec = replace(ADAPTERS, overlap=overlap)
    requests = [request(f"r{n}", 6, 3 + n % 4, adapter=(A, B, C, None)[n % 4]) for n in range(24)]
    engine, device = engine_of(*requests[:16], spec=spec)
    out = outputs(finish_all(engine))
    assert [adapter for _, adapter in device.loads] == [A, B, C], "a slot changes after the last request that needs it"
    for each in requests[16:]:
        engine.submit(each)
    out |= outputs(finish_all(engine))
    assert out == {each.id: solo(each, spec) for each in requests}
    assert len(device.loads) > 3


def test_an_adapter_that_does_not_load_fails_its_request_only() -> None:
    engine, device = engine_of(request("good", 3), spec=ADAPTERS)
    device.broken_adapter = "b"
    engine.submit(request("bad", 3, adapter=B))
    engine.submit(request("fine", 3, adapter=A))
    deltas = finish_all(engine)
    [failed] = [delta for delta in deltas if delta.request_id == "bad"]
    assert (failed.finish, failed.error, failed.tokens) == ("failed", "/b does not fit", ())
    assert outputs(deltas)["fine"] == solo(request("fine", 3, adapter=A), ADAPTERS)
    assert engine.stats().cache_used == 0


# log-probabilities


def test_each_row_gets_the_requested_number_of_logprobs() -> None:
    engine, _ = engine_of(
        request("none", 4),
        request("only", 4, sampling=Sampling(logprobs=0)),
        request("three", 4, sampling=Sampling(logprobs=3, temperature=1.0)),
    )
    by_request: dict[str, list[Delta]] = defaultdict(list)
    for delta in finish_all(engine):
        by_request[delta.request_id].append(delta)
    assert all(delta.logprobs == () for delta in by_request["none"])
    for delta in by_request["only"]:
        assert [(entry.token, entry.top) for entry in delta.logprobs] == [(delta.tokens[0], ())]
    for delta in by_request["three"]:
        [entry] = delta.logprobs
        assert len(entry.top) == 3
        assert entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
        assert entry.logprob <= entry.top[0][1] < 0
        assert entry.token == delta.tokens[0]


def test_missing_logprobs_of_a_backend_are_an_error() -> None:
    class Forgetful(TokenDevice):
        def compute(self, batch: Batch) -> StepResult:
            result = super().compute(batch)
            return StepResult(result.tokens, result.row_starts)

    engine = Engine(Forgetful(SPEC))
    engine.submit(request("a", 3, sampling=Sampling(logprobs=1)))
    with pytest.raises(EngineError, match="no log-probabilities"):
        finish_all(engine)


def test_a_page_table_is_reused_until_a_page_changes() -> None:
    engine, device = engine_of(request("a", 6, 12), request("b", 9, 12))  # pages of 4
    finish_all(engine)
    tables = [(batch.page_tables[0], batch.context_lens.tolist()) for batch in device.batches if batch.num_rows == 2]
    for (before, lens), (table, _) in pairwise(tables[1:]):
        full = any(length % SPEC.groups[0].page_size == 0 for length in lens)
        assert (table is before) == (not full)
