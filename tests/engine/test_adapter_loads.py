"""An adapter is loaded while steps go on; requests that wait for adapters wait for a bounded time."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import pytest

from localllm.engine import scheduler
from localllm.engine.engine import Engine
from localllm.engine.kv import KVCache
from localllm.engine.lora import Adapter, AdapterPool
from localllm.engine.request import Request
from localllm.engine.runner import CacheGroup
from localllm.engine.scheduler import Scheduler

from .token_device import SPEC, App, TokenDevice, finish_all, outputs, solo, start

A, B, C, D = (Adapter(name, f"/{name}", "1") for name in "abcd")
TWO_SLOTS = replace(SPEC, num_adapters=2, adapters_per_step=2)
OVERLAP = replace(TWO_SLOTS, overlap=True)
SPECS = pytest.mark.parametrize("spec", [TWO_SLOTS, OVERLAP], ids=["plain", "overlap"])


@dataclass
class SlowLoads(TokenDevice):
    """Each load waits for `gate`."""

    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self.begun.release()
        assert self.gate.acquire(timeout=100)
        super().load_adapter(slot, adapter)


def started(device: TokenDevice) -> tuple[Engine, App]:
    engine, app = start(device)
    for adapter in (A, B, C, D):
        engine.register_adapter(adapter)
    return engine, app


def tokens_of(app: App, name: str) -> int:
    return sum(len(delta.tokens) for delta in app.deltas if delta.request_id == name)


@SPECS
def test_steps_go_on_while_an_adapter_is_loaded(spec) -> None:
    device = SlowLoads(spec)
    engine, app = started(device)
    stream, swap = Request("stream", (1, 2, 3), 200), Request("swap", (4, 5), 5, adapter=A)
    later = Request("later", (6, 7), 5)
    engine.submit(stream)
    app.wait(deltas=3)
    engine.submit(swap)
    assert device.begun.acquire(timeout=100)
    engine.submit(later)
    deltas = len(app.deltas)
    app.wait(deltas=deltas + 20, ended=1)
    assert tokens_of(app, "swap") == 0
    assert tokens_of(app, "later") == 5
    device.gate.release()
    app.wait(ended=3)
    engine.close()
    assert outputs(app.deltas) == {each.id: solo(each, spec) for each in (stream, swap, later)}


@SPECS
def test_the_engine_sleeps_while_all_requests_wait_for_a_load(spec) -> None:
    device = SlowLoads(spec)
    engine, app = started(device)
    swap = Request("swap", (4, 5), 5, adapter=A)
    engine.submit(swap)
    assert device.begun.acquire(timeout=100)
    other = Request("other", (6, 7), 5)
    engine.submit(other)
    app.wait(ended=1)
    assert device.batches, "another request wakes the engine"
    device.gate.release()
    app.wait(ended=2)
    engine.close()
    assert outputs(app.deltas) == {each.id: solo(each, spec) for each in (swap, other)}
    assert app.failures == []


def test_a_request_is_cancelled_while_its_adapter_is_loaded() -> None:
    device = SlowLoads(TWO_SLOTS)
    engine, app = started(device)
    engine.submit(Request("a", (1, 2), 5, adapter=A))
    assert device.begun.acquire(timeout=100)
    engine.unregister_adapter("a")
    assert engine.cancel("a")
    app.wait(ended=1)
    assert A in device.prepared, "the load still reads its weights"
    device.gate.release(2)
    engine.submit(Request("b", (1, 2), 5, adapter=B))
    app.wait(ended=2)
    engine.close()
    assert A not in device.prepared
    assert [delta.finish for delta in app.deltas if delta.finish] == ["cancelled", "length"]


def test_closing_waits_for_the_end_of_a_load() -> None:
    device = SlowLoads(TWO_SLOTS)
    engine, app = started(device)
    for adapter in (A, B):
        engine.submit(Request(adapter.name, (1, 2), 5, adapter=adapter))
    assert device.begun.acquire(timeout=100)
    closing = threading.Thread(target=engine.close)
    closing.start()
    app.wait(ended=2)
    assert not device.closed
    device.gate.release(2)
    closing.join(30)
    assert device.closed
    assert [delta.finish for delta in app.deltas] == ["cancelled", "cancelled"]


def test_a_load_that_fails_ends_its_request_only() -> None:
    device = TokenDevice(TWO_SLOTS, broken_adapter="a")
    engine, app = started(device)
    good = Request("good", (1, 2), 40, adapter=B)
    engine.submit(good)
    engine.submit(Request("bad", (1, 2), 40, adapter=A))
    app.wait(ended=2)
    engine.close()
    [failed] = [delta for delta in app.deltas if delta.request_id == "bad"]
    assert (failed.finish, failed.error) == ("failed", "/a does not fit")
    assert outputs(app.deltas)["good"] == solo(good, TWO_SLOTS)


def test_an_unexpected_error_of_a_load_closes_the_engine() -> None:
    @dataclass
    class Broken(TokenDevice):
        def load_adapter(self, slot: int, adapter: Adapter) -> None:
            raise ZeroDivisionError("a bug")

    engine, app = started(Broken(TWO_SLOTS))
    engine.submit(Request("a", (1, 2), 40, adapter=A))
    app.wait(failures=1)
    engine.close()
    assert isinstance(app.failures[0].__cause__, ZeroDivisionError)


class Starts:
    """An engine whose requests arrive while others run. It records the order in which the requests start."""

    def __init__(self, spec=OVERLAP) -> None:
        self.engine = Engine(TokenDevice(spec))
        for adapter in (A, B, C, D):
            self.engine.register_adapter(adapter)
        self.submitted: list[str] = []
        self.order: list[str] = []

    def submit(self, adapter: Adapter | None, max_tokens: int = 6) -> str:
        name = f"r{len(self.submitted)}"
        self.submitted.append(name)
        number = len(self.submitted) % SPEC.vocab_size
        self.engine.submit(Request(name, (number, 1 + number // 2), max_tokens, adapter=adapter))
        return name

    def step(self) -> None:
        for delta in self.engine.step():
            assert not delta.error
            if delta.request_id not in self.order:
                self.order.append(delta.request_id)

    def overtaking(self, name: str) -> int:
        """The number of requests that arrived after this one and started before it."""
        arrival = self.submitted.index(name)
        before = self.order[: self.order.index(name)]
        return sum(self.submitted.index(other) > arrival for other in before)


@pytest.mark.parametrize("popular", [(A, B), (A, B, None)], ids=["adapters", "adapters and base"])
def test_a_rare_adapter_starts_after_a_bounded_number_of_later_requests(popular: tuple[Adapter | None, ...]) -> None:
    """The slots are never free of their own accord: popular adapters get new requests all the time."""
    starts = Starts()
    number = 0
    rare = ""
    for step in range(400):
        for _ in range(2):
            starts.submit(popular[number % len(popular)])
            number += 1
        if step == 20:
            rare = starts.submit(C)
        starts.step()
        if rare in starts.order:
            break
    assert 0 < starts.overtaking(rare) <= scheduler.MAX_OVERTAKING


def test_no_request_starves_under_skew() -> None:
    generator = random.Random(7)
    starts = Starts()
    adapters = [A] * 16 + [None] * 6 + [B] * 4 + [C] * 2 + [D]
    for _ in range(500):
        starts.submit(generator.choice(adapters), generator.randrange(1, 12))
        starts.step()
    while starts.engine.has_work:
        starts.step()
    assert max(starts.overtaking(name) for name in starts.submitted) <= scheduler.MAX_OVERTAKING


def test_base_requests_pass_a_request_that_waits_for_a_slot() -> None:
    engine = Engine(TokenDevice(TWO_SLOTS))
    for adapter in (A, B, C):
        engine.register_adapter(adapter)
    requests = [Request("a", (1, 2), 30, adapter=A), Request("b", (3, 4), 30, adapter=B)]
    requests += [Request("c", (5, 6), 3, adapter=C), Request("base", (7, 8), 3)]
    for each in requests:
        engine.submit(each)
    deltas = finish_all(engine)
    assert outputs(deltas) == {each.id: solo(each, TWO_SLOTS) for each in requests}
    ends = [delta.request_id for delta in deltas if delta.finish]
    assert ends.index("base") < ends.index("a") < ends.index("c")


def test_a_refused_load_is_tried_again_for_the_next_request() -> None:
    device = TokenDevice(TWO_SLOTS, broken_adapter="a")
    engine = Engine(device)
    engine.register_adapter(A)
    engine.submit(Request("first", (1, 2), 3, adapter=A))
    [failed] = finish_all(engine)
    assert "does not fit" in failed.error
    device.broken_adapter = ""
    second = Request("second", (1, 2), 3, adapter=A)
    engine.submit(second)
    assert outputs(finish_all(engine)) == {"second": solo(second, TWO_SLOTS)}


def test_a_slot_is_loaded_after_the_steps_that_read_it() -> None:
    """TokenDevice refuses a load into a slot that a step in flight reads."""
    spec = replace(OVERLAP, num_adapters=1, adapters_per_step=1)
    engine = Engine(TokenDevice(spec))
    for adapter in (A, B):
        engine.register_adapter(adapter)
    engine.submit(Request("a", (1, 2), 30, adapter=A))
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    b = Request("b", (3, 4), 3, adapter=B)
    engine.submit(b)
    assert outputs(finish_all(engine))["b"] == solo(b, spec)


def test_a_later_request_without_memory_does_not_delay_one_whose_load_ends() -> None:
    spec = replace(TWO_SLOTS, groups=(CacheGroup(4, 12),))
    device = TokenDevice(spec)
    device.prepare_adapter(A)
    pool = AdapterPool(2, 2, device.load_adapter)  # a load ends when the test calls `loaded`
    pool.register(A)
    scheduler = Scheduler(spec, KVCache(spec), pool)

    def step() -> set[str]:
        batch = scheduler.schedule()
        assert batch is not None
        return {delta.request_id for delta in scheduler.commit(device.run(batch).result())}

    scheduler.add(Request("stream", tuple(range(12)), 20))
    assert step() == {"stream"}
    scheduler.add(Request("adapted", (4, 5), 2, adapter=A))
    scheduler.add(Request("large", tuple(range(40, 84)), 2))
    assert step() == {"stream"}
    assert scheduler.stats().waiting == 2
    pool.loaded(A)
    assert step() == {"stream", "adapted"}


def test_a_failure_ends_the_thread_of_the_loads() -> None:
    """Nobody closes a failed engine if that could hang: its threads must not stay, and waiting loads must not start."""
    device = SlowLoads(TWO_SLOTS, fail_at=1)
    engine, app = started(device)
    for adapter in (A, B):
        engine.submit(Request(adapter.name, (1, 2), 5, adapter=adapter))
    assert device.begun.acquire(timeout=100)
    engine.submit(Request("plain", (1, 2), 20))
    app.wait(failures=1)
    [loader] = [thread for thread in threading.enumerate() if thread.name.startswith("adapters")]
    device.gate.release()
    loader.join(30)
    assert not loader.is_alive()
    assert not device.begun.acquire(blocking=False), "the second load did not start"
    engine.close()
