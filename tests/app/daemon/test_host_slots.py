"""Which worker a model gets, without processes: workers load, end and answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from localllm.app.config import Settings
from localllm.app.daemon import host as hosts
from localllm.app.daemon.host import Host
from localllm.app.errors import AppError, InvalidRequest, ModelNotFound, Overloaded, Stopping
from localllm.app.frames import Generate, Load, ModelInfo, Stats
from localllm.app.store.catalog import ModelRef

from ..samples import model_info

INFO = model_info(weight_bytes=100, cache_bytes=20, cache_tokens=7, token_bytes=50, warnings=("slow",))


class FakeWorker:
    """A worker without a process. It loads at once, unless `wait` was cleared."""

    made: list[FakeWorker]
    wait: asyncio.Event

    def __init__(self, load: Load, *, on_over: Callable[[Any], None], step_timeout: float, **_: Any) -> None:
        self.load_frame = load
        self.model = load.model
        self.step_timeout = step_timeout
        self.on_over = on_over
        self.state = "loading"
        self.info: ModelInfo | None = None
        self.listeners: list[Any] = []
        self.expected_end: AppError | None = None
        self.end_error = Stopping("ended")
        self.unfinished = 0
        self.idle = 0.0
        self.pid = 7
        self.quiet_for: list[float] = []
        self.process_gone = asyncio.Event()
        self.said: Stats | None = None
        FakeWorker.made.append(self)

    async def start(self) -> ModelInfo:
        await FakeWorker.wait.wait()
        load = self.load_frame
        backend = "cpu" if load.backend == "auto" else load.backend
        self.info = structs.replace(INFO, model=load.model, backend=backend)
        self.state = "ready"
        return self.info

    def open(self, requests: Any, weight: int) -> Any:
        self.unfinished += weight
        return requests

    async def stats(self, seconds: float) -> Stats | None:
        return self.said

    async def quiet(self, seconds: float) -> None:
        self.quiet_for.append(seconds)

    async def gone(self) -> None:
        await self.process_gone.wait()

    async def stop(self, error: AppError) -> None:
        self.expected_end = error
        self.die()
        self.process_gone.set()

    def die(self) -> None:
        self.state = "over"
        self.on_over(self)


async def until_made(made: list[FakeWorker], count: int) -> None:
    """Wait for so many workers, and for what goes on beside them to go as far as it can."""
    for _ in range(500):
        if len(made) >= count:
            break
        await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The workers, in the order in which they were made."""
    FakeWorker.made = []
    FakeWorker.wait = asyncio.Event()
    FakeWorker.wait.set()
    monkeypatch.setattr(hosts, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(hosts.catalog, "resolve", lambda name, allow_path: ModelRef(id=name, path=Path("/") / name))
    return FakeWorker.made


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were looked at."""
    looked: list[str] = []

    async def check(backend: str, ref: ModelRef) -> None:
        looked.append(backend)

    monkeypatch.setattr(hosts, "check_backend", check)
    return looked


async def test_a_model_is_loaded_once(made: list[FakeWorker], checked: list[str]) -> None:
    host = Host(Settings(step_timeout=3.0))
    first = await host.worker("a")
    for asked in ({}, {"backend": "auto"}, {"backend": "cpu"}, {"quant": "none"}):
        assert await host.worker("a", **asked) is first  # type: ignore[arg-type]
    assert await host.worker("b") is not first
    assert [worker.step_timeout for worker in made] == [3.0, 3.0]
    assert checked == []
    await host.close()


@pytest.mark.parametrize(("asked", "looked"), [({"backend": "cuda"}, ["cuda"]), ({"quant": "int8"}, [])])
async def test_another_way_of_loading_ends_the_one_before(
    made: list[FakeWorker], checked: list[str], asked: Any, looked: list[str]
) -> None:
    host = Host(Settings())
    first = await host.worker("a")
    first.unfinished = 1
    with pytest.raises(InvalidRequest, match="busy") as refused:
        await host.worker("a", **asked)
    assert refused.value.param == next(iter(asked))
    assert first.state == "ready"
    first.unfinished = 0
    checked.clear()
    second = await host.worker("a", **asked)
    assert (first.state, second.state) == ("over", "ready")
    assert checked == looked, "once, before the first one went"
    assert made[0].quiet_for == [0.0], "it holds nothing"
    assert await host.worker("a") is second
    assert host.deaths == {}
    await host.close()


async def test_a_worker_has_at_most_max_queue_requests(made: list[FakeWorker]) -> None:
    host = Host(Settings(max_queue=3))
    with pytest.raises(InvalidRequest) as refused:
        await host.open("a", [], weight=4)
    assert refused.value.param == "n"
    assert made == [], "the model is not loaded for a request that no load could help"
    await host.open("a", [], weight=1)
    await host.open("a", [], weight=2)
    (worker,) = made
    assert worker.unfinished == 3
    with pytest.raises(Overloaded):
        await host.open("a", [])
    worker.unfinished = 0
    await host.open("a", [], weight=3)
    host.stopping = True
    with pytest.raises(Stopping):
        await host.open("a", [], weight=1)
    await host.close()


async def test_a_request_loads_its_model(made: list[FakeWorker]) -> None:
    host = Host(Settings())
    requests: Any = [Generate(id="r")]
    assert await host.open("a", requests, weight=1) == requests
    assert await host.open(None, requests, weight=1) == requests, "without a name: the only loaded model"
    assert [(worker.model, worker.unfinished) for worker in made] == [("a", 2)]
    with pytest.raises(ModelNotFound):
        await host.open("/b", requests)
    await host.open("/b", requests, local=True)
    assert await host.load("/b", local=True) == "/b"
    await host.close()


async def test_the_only_model(made: list[FakeWorker]) -> None:
    host = Host(Settings())
    with pytest.raises(InvalidRequest, match="none"):
        await host.open(None, [])
    assert host.find("a") is None
    first = await host.worker("a")
    assert host.find("a") is first
    await host.open(None, [])
    assert made[0].unfinished == 1
    await host.worker("b")
    with pytest.raises(InvalidRequest, match="a, b"):
        await host.open(None, [])
    with pytest.raises(ModelNotFound) as unknown:
        await host.unload("c")
    assert unknown.value.hint == "loaded: a, b"
    await host.unload("b")
    await host.open(None, [])
    assert made[0].unfinished == 2
    assert made[1].quiet_for == [Settings().drain]
    assert str(made[1].expected_end) == "b was unloaded"
    await host.close()
    assert str(made[0].expected_end) == hosts.STOPPING


async def test_who_unloads_a_model_that_leaves_waits_for_its_end(made: list[FakeWorker]) -> None:
    host = Host(Settings(drain=2.0))
    await host.worker("a")
    await asyncio.gather(host.unload("a"), host.unload("a"), host.close())
    assert made[0].quiet_for == [2.0]
    assert host.find("a") is None


async def test_paths_are_for_our_own_client(made: list[FakeWorker]) -> None:
    host = Host(Settings())
    for name in ("/a", "./a", "~"):
        with pytest.raises(ModelNotFound):
            await host.worker(name)
    assert (await host.worker("/a", local=True)).model == "/a"
    await host.close()


async def test_what_is_said_of_a_loaded_model(made: list[FakeWorker]) -> None:
    host = Host(Settings(idle_unload=100.0))
    await host.worker("a")
    (worker,) = made
    worker.idle = 30.0
    (model,) = await host.loaded()
    assert (model.state, model.memory, model.cache_tokens, model.cache_used, model.token_bytes) == (
        "ready",
        120,
        7,
        0,
        50,
    )
    assert (model.idle, model.unload_in, model.warnings, model.requests, model.pid) == (30.0, 70.0, ("slow",), 0, 7)
    worker.said = Stats(id="s", running=1, waiting=0, cache_tokens=7, cache_used=5)
    worker.idle, worker.unfinished = 0.0, 2
    (model,) = await host.loaded()
    assert (model.cache_used, model.requests, model.unload_in) == (5, 2, None)
    worker.state = "over"
    assert await host.loaded() == []
    worker.state = "ready"
    await host.close()
    forever = Host(Settings(idle_unload=0))
    await forever.worker("a")
    (model,) = await forever.loaded()
    assert model.unload_in is None
    assert forever._idle_task is None
    await forever.close()


@pytest.mark.parametrize(("limit", "pause"), [(8.0, 2.0), (900.0, 5.0)])
async def test_idle_models_are_unloaded(
    made: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, limit: float, pause: float
) -> None:
    pauses: asyncio.Queue[float] = asyncio.Queue()
    looks = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        pauses.put_nowait(seconds)
        await looks.acquire()

    monkeypatch.setattr(hosts.asyncio, "sleep", sleep)
    host = Host(Settings(idle_unload=limit))
    await host.worker("a")
    await host.worker("b")
    made[0].idle, made[1].idle = limit, limit + 0.1
    async with asyncio.timeout(10):
        assert await pauses.get() == pause
        looks.release()
        assert await pauses.get() == pause, "one janitor for all, that looks again and again"
        await made[1].process_gone.wait()
    assert (made[0].state, made[1].state) == ("ready", "over")
    assert made[1].quiet_for == [0.0]
    assert pauses.empty()
    await host.close()
    assert host._idle_task is not None
    await asyncio.wait([host._idle_task], timeout=10)
    assert host._idle_task.cancelled()


async def test_a_death_is_counted_and_the_next_waits_for_the_process(made: list[FakeWorker]) -> None:
    """Not where it was told to end, nor where it never was ready."""
    host = Host(Settings())
    for _ in range(2):
        worker: Any = await host.worker("a")
        worker.process_gone.set()
        worker.die()
    assert host.deaths == {"a": 2}
    made[-1].process_gone.clear()
    coming = asyncio.create_task(host.worker("a"))
    await until_made(made, 3)
    assert not coming.done()
    made[1].process_gone.set()
    assert (await coming).state == "ready"
    assert host._ended == []
    await host.unload("a")
    FakeWorker.wait.clear()
    loading = asyncio.create_task(host.worker("a"))
    await until_made(made, 4)
    made[3].process_gone.set()
    made[3].die()
    assert host.deaths == {"a": 2}
    FakeWorker.wait.set()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_models_load_one_after_the_other(made: list[FakeWorker]) -> None:
    FakeWorker.wait.clear()
    host = Host(Settings())
    first, second = (asyncio.create_task(host.worker(name)) for name in ("a", "b"))
    await until_made(made, 2)
    (loading, waiting) = await host.loaded()
    assert (loading.state, waiting.state, loading.pid) == ("loading", "loading", 7)
    await host.unload("b")
    FakeWorker.wait.set()
    assert (await first).state == "ready"
    with pytest.raises(Stopping, match="ended"):
        await second
    assert made[1].info is None, "it was unloaded before its turn"
    await host.close()


async def test_a_daemon_that_stops(made: list[FakeWorker]) -> None:
    host = Host(Settings())
    await host.worker("a")
    await host.drain(3.0)
    assert made[0].quiet_for == [3.0]
    with pytest.raises(Stopping):
        await host.worker("a")
    with pytest.raises(Stopping):
        await host.worker("b")
    assert len(made) == 1
    await host.close()


async def test_progress_is_told_to_who_wants_it(made: list[FakeWorker]) -> None:
    def tell(stage: str, done: float) -> None: ...

    host = Host(Settings())
    await host.worker("a")
    await host.worker("a", progress=tell)
    assert made[0].listeners == [tell]
    await host.close()
