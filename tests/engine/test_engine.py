"""The loop on its own thread: callbacks, cancelling from elsewhere, failures, closing."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from localllm.engine.batch import Batch
from localllm.engine.engine import Engine
from localllm.engine.errors import (
    ContextOverflow,
    EngineError,
    ModelRefused,
    OutOfMemory,
    RequestRefused,
)
from localllm.engine.lora import Adapter
from localllm.engine.request import Request
from localllm.engine.runner import CacheGroup, StepResult

from .test_equal_outputs import WITH_ADAPTERS, Modulo, assert_equal_to_solo, requests_of
from .token_device import SPEC, App, Step, TokenDevice, finish_all, outputs, solo, start

OVERLAP = replace(SPEC, overlap=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_from_several_threads(overlap: bool) -> None:
    spec = replace(WITH_ADAPTERS, overlap=overlap, groups=(CacheGroup(4, 60),))
    engine, app = start(TokenDevice(spec))
    requests = requests_of(7, 40)
    for each in requests:
        if each.adapter is not None:
            engine.register_adapter(each.adapter)

    def submit(part: list[Request]) -> None:
        for each in part:
            engine.submit(each)
            if random.random() < 0.2:
                engine.cancel(each.id)
            engine.stats()

    threads = [threading.Thread(target=submit, args=(requests[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    app.wait(ended=40)
    engine.close()
    assert_equal_to_solo(app.deltas, requests_of(7, 40), spec)
    assert app.threads == {"engine"}
    assert app.failures == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_used) == (0, 0, 0)
    assert stats.steps >= len(app.calls) - 40  # one call a step, and at most one for each cancelled
    assert 0 < stats.step_host_seconds <= stats.step_seconds


def test_an_idle_engine_sleeps_and_wakes() -> None:
    device = TokenDevice(OVERLAP)
    engine, app = start(device)
    for number in range(3):
        engine.submit(Request(f"r{number}", (1, 2), 2))
        app.wait(ended=number + 1)
    assert device.log.count("run") == 6  # no step without work
    engine.close()
    engine.close()
    assert device.closed
    assert app.deltas[-1].finish == "length"


def test_refusals_reach_the_caller() -> None:
    engine, app = start(TokenDevice(SPEC))
    with pytest.raises(ContextOverflow):
        engine.submit(Request("long", (1,) * 300, 4))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("late", (1,), 4))
    assert app.deltas == []


@dataclass
class Gate(TokenDevice):
    """Holds every result until it is let through."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def compute_until(self, step: Step) -> None:
        self.asked.release()
        assert self.gate.acquire(timeout=100)
        super().compute_until(step)


@pytest.mark.parametrize("spec", [SPEC, OVERLAP], ids=["plain", "overlap"])
def test_cancelling_while_a_step_runs_frees_its_pages_at_once(spec) -> None:
    device = Gate(spec)
    engine, app = start(device)
    engine.submit(Request("a", tuple(range(30)), 20))
    assert device.asked.acquire(timeout=100)
    assert engine.stats().cache_used >= 32
    engine.cancel("a")
    assert engine.stats().cache_used == 0
    steps = engine.stats().steps
    other = Request("b", (9, 8, 7), 3)
    engine.submit(other)
    device.gate.release(100)
    app.wait(ended=2)
    assert [delta.finish for delta in app.deltas if delta.request_id == "a"] == ["cancelled"]
    assert outputs(app.deltas)["b"] == solo(other)
    assert all(batch.num_rows == 1 for batch in device.batches[steps:])
    engine.close()


@pytest.mark.parametrize("spec", [SPEC, OVERLAP], ids=["plain", "overlap"])
def test_closing_ends_all_requests(spec) -> None:
    device = TokenDevice(spec)
    engine, app = start(device)
    for name in ("a", "b"):
        engine.submit(Request(name, (1, 2), 200))
    app.wait(deltas=4)
    engine.close()
    assert device.closed
    assert device.log.count("run") == device.log.count("result")
    assert sorted(delta.request_id for delta in app.deltas if delta.finish == "cancelled") == ["a", "b"]
    assert app.failures == []


def test_closing_an_engine_that_never_started() -> None:
    app, device = App(), TokenDevice(OVERLAP)
    engine = Engine(device, app.on_deltas)
    engine.submit(Request("a", (1, 2), 20))
    engine.step()
    engine.close()
    engine.close()
    assert device.closed
    assert [delta.finish for delta in app.deltas] == ["cancelled"]


def test_closing_from_the_callback() -> None:
    device = TokenDevice(SPEC)
    finished = threading.Event()
    engine = Engine(device, lambda deltas: (engine.close(), finished.set()))
    engine.submit(Request("a", (1, 2), 20))
    engine.start()
    assert finished.wait(100)
    engine.close()
    assert device.closed


@pytest.mark.parametrize("spec", [SPEC, OVERLAP], ids=["plain", "overlap"])
def test_a_failing_step_closes_the_engine_and_reports_the_lost_requests(spec) -> None:
    device = TokenDevice(spec, fail_at=3)
    app = App()
    engine = Engine(device, app.on_deltas, app.on_failure)
    for name in ("a", "b"):
        engine.submit(Request(name, (1, 2), 20))
    engine.submit(Request("short", (1, 2), 1))
    engine.start()
    app.wait(failures=1)
    engine.close()
    [failure] = app.failures
    assert failure.request_ids == ("a", "b")
    assert "on fire" in str(failure)
    assert isinstance(failure.__cause__, RuntimeError)
    assert [delta.request_id for delta in app.deltas if delta.finish] == ["short"]
    assert device.closed
    assert app.threads == {"engine"}
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("late", (1,), 4))
    assert not engine.cancel("short")


def test_a_failing_launch_is_a_failing_step() -> None:
    class NoLaunch(TokenDevice):
        def run(self, batch: Batch) -> Step:
            raise MemoryError

    engine, app = start(NoLaunch(SPEC))
    engine.submit(Request("a", (1,), 4))
    app.wait(failures=1)
    engine.close()
    assert str(app.failures[0]) == "MemoryError"
    assert app.failures[0].request_ids == ("a",)


class BrokenGrammar(Modulo):
    """Fails after two tokens. `kind`: the kind of failure."""

    kind = ""

    def allowed(self):
        if len(self.taken) == 2 and self.kind == "allowed":
            raise RuntimeError("lexer is too complex")
        if len(self.taken) == 2 and self.kind == "nothing":
            return super().allowed() * 0
        if len(self.taken) == 2 and self.kind == "shape":
            return super().allowed()[:1]
        return super().allowed()

    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.taken) == 3 and self.kind == "accept":
            raise RuntimeError("cannot take this")


@pytest.mark.parametrize("spec", [SPEC, OVERLAP], ids=["plain", "overlap"])
@pytest.mark.parametrize(
    ("kind", "error", "tokens"),
    [
        ("allowed", "lexer is too complex", 2),
        ("nothing", "the grammar allows no token", 2),
        ("shape", "does not match the vocabulary size 96", 2),
        ("accept", "cannot take this", 3),
    ],
)
def test_a_failing_grammar_fails_its_request_only(spec, kind: str, error: str, tokens: int) -> None:
    grammar = BrokenGrammar(1, 100)
    grammar.kind = kind
    engine = Engine(TokenDevice(spec))
    good = Request("good", (5, 6), 10)
    engine.submit(Request("bad", (5, 6), 10, grammar=grammar))
    engine.submit(good)
    deltas = finish_all(engine)
    [last] = [delta for delta in deltas if delta.request_id == "bad" and delta.finish]
    assert last.finish == "failed"
    assert error in last.error
    out = outputs(deltas)
    assert len(out["bad"]) == tokens
    assert out["good"] == solo(good)
    assert engine.stats().cache_used == 0


def test_find_adapter_returns_the_adapter_of_a_name() -> None:
    engine = Engine(TokenDevice(WITH_ADAPTERS))
    adapter = Adapter("a", "/a", "1")
    assert engine.find_adapter("a") is None
    engine.register_adapter(adapter)
    assert engine.find_adapter("a") == adapter


class UnloadsDuringLoad(TokenDevice):
    """Another thread unloads the adapter while it is loaded once more."""

    engine: Engine

    def prepare_adapter(self, adapter: Adapter) -> None:
        super().prepare_adapter(adapter)
        self.engine.unregister_adapter(adapter.name)


def test_an_unload_during_a_load_keeps_the_prepared_adapter() -> None:
    device = UnloadsDuringLoad(WITH_ADAPTERS)
    device.engine = Engine(device)
    adapter = Adapter("a", "/a", "1")
    for _ in range(2):
        device.engine.register_adapter(adapter)
        assert device.engine.adapters == (adapter,)
        assert device.prepared == {adapter}


def test_an_adapter_that_cannot_be_registered_takes_no_memory() -> None:
    device = TokenDevice(replace(SPEC, num_adapters=1, adapters_per_step=1))
    engine = Engine(device)
    with pytest.raises(RequestRefused, match="cannot be pinned"):
        engine.register_adapter(Adapter("a", "/a", "1"), pinned=True)
    assert not device.prepared


def test_prepared_adapter_survives_the_end_of_its_last_request() -> None:
    """A load of an adapter that is unloaded, but still in use, must not lose its weights before the registration."""
    device = TokenDevice(WITH_ADAPTERS)
    engine = Engine(device)
    adapter = Adapter("a", "/a", "1")
    engine.register_adapter(adapter)
    engine.submit(Request("r", (1, 2, 3), 4, adapter=adapter))
    engine.unregister_adapter("a")
    with engine.prepared_adapter(adapter):
        finish_all(engine)
        assert adapter in device.prepared
        engine.register_adapter(adapter)
    assert adapter in device.prepared
    engine.submit(Request("s", (1, 2, 3), 4, adapter=adapter))
    finish_all(engine)


def test_adapter_that_does_not_fit_leaves_nothing_behind(monkeypatch) -> None:
    device = TokenDevice(WITH_ADAPTERS)
    engine = Engine(device)

    def refuse(adapter: Adapter) -> None:
        raise ModelRefused("it does not fit")

    monkeypatch.setattr(device, "prepare_adapter", refuse)
    with pytest.raises(ModelRefused, match="does not fit"):
        engine.register_adapter(Adapter("a", "/a", "1"))
    assert engine.adapters == ()


def test_prepared_adapter_is_freed_unless_it_is_registered() -> None:
    device = TokenDevice(WITH_ADAPTERS)
    engine = Engine(device)
    adapter = Adapter("a", "/a", "1")
    with engine.prepared_adapter(adapter):
        assert adapter in device.prepared
    assert device.prepared == set()


def test_a_stuck_scheduler_is_an_error(monkeypatch) -> None:
    engine = Engine(TokenDevice(SPEC))
    engine.submit(Request("a", (1, 2), 2))
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: None)
    with pytest.raises(EngineError, match="bug in the scheduler"):
        engine.step()


@dataclass
class Short(TokenDevice):
    """Finds too little memory for the steps with these numbers, some of whose work it has done by then; with `late`
    it says so only when their answers are asked for."""

    short_at: frozenset[int] = frozenset()
    late: bool = False

    def run(self, batch: Batch) -> Step:
        if len(self.batches) not in self.short_at:
            return super().run(batch)
        self.check(batch)
        self.batches.append(batch)

        def spoil() -> None:
            self.last = StepResult(np.full(batch.sample_starts[-1], 77, np.int32), batch.sample_starts)
            self.write(batch, np.full((batch.num_tokens, 3), 77))
            self.run_states(batch, np.full(batch.num_tokens, 77), np.full(batch.num_tokens, 77))

        self.queue.append(spoil)
        if self.late:
            return WithoutAnswer(self, batch)
        raise OutOfMemory("too little memory for a step")


class WithoutAnswer(Step):
    def result(self) -> StepResult:
        raise OutOfMemory("too little memory for a step's answers")


EVERY_KIND = replace(
    SPEC, groups=(CacheGroup(4, 128), CacheGroup(2, 64, window=7)), num_states=6, num_snapshots=5, max_rows=6
)


@pytest.mark.parametrize("spec", [SPEC, OVERLAP, replace(OVERLAP, groups=(CacheGroup(4, 24),)), EVERY_KIND], ids=str)
@pytest.mark.parametrize("late", [False, True], ids=["when started", "when answered"])
@pytest.mark.parametrize("seed", range(6))
def test_a_step_out_of_memory_ends_only_its_requests(spec, late: bool, seed: int) -> None:
    """What it left half done in pages that equal prompts would share is never read. A step that was started when the
    one before has no answers goes with it."""
    choose = random.Random(seed)
    device = Short(spec, short_at=frozenset(choose.sample(range(40), 4)), late=late)
    engine = Engine(device)
    beginning = tuple(choose.randrange(96) for _ in range(20))
    requests, deltas = [], []
    for number in range(40):
        own = tuple(choose.randrange(96) for _ in range(choose.randrange(1, 30)))
        start = beginning if number % 2 else beginning[: choose.randrange(21)]
        requests.append(Request(f"r{number}", start + own, choose.randrange(1, 12)))
        engine.submit(requests[-1])
        for _ in range(choose.randrange(4)):
            deltas += engine.step()
    deltas += finish_all(engine)
    ends = {delta.request_id: delta for delta in deltas if delta.finish}
    assert len(ends) == 40
    lost = {name for name, delta in ends.items() if delta.finish == "no_memory"}
    numbers = {at + more for at in device.short_at for more in range(1 + (late and spec.overlap))}
    rows = sum(device.batches[at].num_rows for at in numbers if at < len(device.batches))
    assert 0 < len(lost) <= rows
    assert all("too little memory" in ends[name].error for name in lost)
    out = outputs(deltas)
    for each in requests:
        wanted = solo(each, replace(spec, overlap=False))
        assert out[each.id] == (wanted[: len(out[each.id])] if each.id in lost else wanted)
    assert engine.stats().cache_used == 0


@pytest.mark.parametrize("late", [False, True], ids=["when started", "when answered"])
def test_an_engine_fails_if_steps_keep_running_out_of_memory(late: bool) -> None:
    engine, app = start(Short(OVERLAP, short_at=frozenset(range(100)), late=late))
    for number in range(8):
        engine.submit(Request(f"r{number}", (number, 2), 5))
        app.wait(ended=min(number + 1, 2), failures=int(number >= 2))
        if app.failures:
            break
    assert [delta.finish for delta in app.deltas] == ["no_memory"] * 2
    assert app.failures[0].request_ids == ("r2",)
    assert isinstance(app.failures[0].__cause__, OutOfMemory)
    engine.close()


def test_close_closes_the_runner_after_a_failure() -> None:
    """Closing a broken runner may hang, so the failure is reported before the runner is closed."""
    device = TokenDevice(SPEC, fail_at=0)
    engine, app = start(device)
    engine.submit(Request("a", (1, 2), 20))
    app.wait(failures=1)
    assert engine._thread is not None
    engine._thread.join(30)
    assert not device.closed
    engine.close()
    assert device.closed
    engine.close()


def test_stats_have_the_age_of_the_current_step() -> None:
    device = Gate(SPEC)
    engine, app = start(device)
    assert engine.stats().step_age == 0.0
    engine.submit(Request("a", (1, 2), 1))
    assert device.asked.acquire(timeout=100)
    ages = engine.stats().step_age, engine.stats().step_age
    assert 0 < ages[0] < ages[1] < 30
    device.gate.release()
    app.wait(ended=1)
    engine.close()
    assert engine.stats().step_age == 0.0
