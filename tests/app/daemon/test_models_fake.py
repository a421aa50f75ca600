"""The loaded models, with fake workers instead of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from localllm.app.api.admin import LoadFlags
from localllm.app.config import Settings
from localllm.app.daemon import lifecycle
from localllm.app.daemon import models as loaded_models
from localllm.app.daemon.models import LoadedModels
from localllm.app.developer import Developer
from localllm.app.errors import (
    AdapterNotFound,
    AppError,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Stopping,
)
from localllm.app.frames import Generate, Load, ModelInfo, Stats
from localllm.app.store import preferences
from localllm.app.store.local.refs import ModelRef

from ..samples import model_info

INFO = model_info(weight_bytes=100, cache_bytes=20, cache_tokens=7, token_bytes=50, warnings=("slow",))


class Opened(list[Any]):
    """The requests of a stream."""

    adapter = ""


class FakeWorker:
    """A worker without a process. It loads when the event `wait` is set."""

    workers: list[FakeWorker]
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
        self.statistics: Stats | None = None
        FakeWorker.workers.append(self)

    async def start(self) -> ModelInfo:
        await FakeWorker.wait.wait()
        load = self.load_frame
        backend = "cpu" if load.backend == "auto" else load.backend
        self.info = structs.replace(INFO, model=load.model, backend=backend)
        self.state = "ready"
        return self.info

    def open(self, requests: Any, weight: int) -> Any:
        self.unfinished += weight
        return Opened(requests)

    async def stats(self, seconds: float) -> Stats | None:
        return self.statistics

    async def wait_idle(self, seconds: float) -> None:
        self.quiet_for.append(seconds)

    async def wait_gone(self) -> None:
        await self.process_gone.wait()

    async def stop(self, error: AppError) -> None:
        self.expected_end = error
        self.die()
        self.process_gone.set()

    def die(self) -> None:
        self.state = "over"
        self.on_over(self)


async def until_created(workers: list[FakeWorker], count: int) -> None:
    """Wait until `count` workers exist, and let all other tasks run until they wait."""
    for _ in range(500):
        if len(workers) >= count:
            break
        await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0)


def ref(name: str, allow_path: bool = False) -> ModelRef:
    return ModelRef(id=name, path=Path("/") / name)


def find(name: str, allow_path: bool = False) -> ModelRef | None:
    """Every model exists. Of the names with a colon, only qwen3:0.6b is the name of a model."""
    return ref(name) if ":" not in name or name == "qwen3:0.6b" else None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
    """The workers in the order of their creation."""
    FakeWorker.workers = []
    FakeWorker.wait = asyncio.Event()
    FakeWorker.wait.set()
    monkeypatch.setattr(loaded_models, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(loaded_models.resolved, "model", ref)
    monkeypatch.setattr("localllm.app.daemon.names.find_model", find)
    return FakeWorker.workers


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were probed."""
    probed: list[str] = []

    async def check(backend: str, ref: ModelRef) -> None:
        probed.append(backend)

    monkeypatch.setattr(loaded_models, "check_backend", check)
    return probed


async def test_model_is_loaded_once(workers: list[FakeWorker], checked: list[str]) -> None:
    models = LoadedModels(Settings(developer=Developer(step_timeout=3.0)))
    first = await models.worker("a")
    for flags in (LoadFlags(), LoadFlags(backend="auto"), LoadFlags(backend="cpu"), LoadFlags(quant="none", context=0)):
        for exact in (False, True):
            assert await models.worker("a", flags=flags, exact=exact) is first
    assert await models.worker("b") is not first
    assert [worker.step_timeout for worker in workers] == [3.0, 3.0]
    assert checked == []
    await models.close()


@pytest.mark.parametrize(
    ("requested", "probed"),
    [
        ({"backend": "cuda"}, ["cuda"]),
        ({"quant": "int8"}, []),
        ({"context": 64}, []),
        ({"rope_scale": 2.0}, []),
    ],
)
async def test_reload_ends_the_previous_worker(
    workers: list[FakeWorker], checked: list[str], requested: Any, probed: list[str]
) -> None:
    models = LoadedModels(Settings())
    first = await models.worker("a")
    first.unfinished = 1
    with pytest.raises(InvalidRequest, match="busy") as refused:
        await models.worker("a", flags=LoadFlags(**requested))
    assert refused.value.param == next(iter(requested))
    assert first.state == "ready"
    first.unfinished = 0
    checked.clear()
    second = await models.worker("a", flags=LoadFlags(**requested))
    assert (first.state, second.state) == ("over", "ready")
    assert checked == probed, "one probe, before the end of the first worker"
    assert workers[0].quiet_for == [0.0], "the first worker has no requests"
    assert await models.worker("a") is second
    assert models.deaths == {}
    await models.close()


async def test_exact_load_does_not_keep_the_flags_of_an_earlier_call(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings())
    flags = LoadFlags(quant="int4", context=64)
    loaded = await models.load("a", flags=flags, exact=True)
    assert (loaded.options, loaded.kept) == (("--quant int4", "--context 64"), False)
    (first,) = workers
    assert await models.worker("a") is first, "a request without a load uses the loaded model"
    first.unfinished = 1
    assert (await models.load("a", exact=True)).kept, "a busy model keeps its flags, and the reply says so"
    assert workers == [first]
    first.unfinished = 0
    plain = await models.load("a", exact=True)
    assert (plain.options, plain.kept, len(workers)) == ((), False, 2)
    assert not (await models.load("a", exact=True)).kept
    assert len(workers) == 2
    await models.close()


async def test_settings_of_a_model_apply_to_its_load(workers: list[FakeWorker]) -> None:
    preferences.set_settings("org/a", {"quant": "int8", "context": 64, "max_rows": 2})
    models = LoadedModels(Settings(context=128, flags=("context",)))
    loaded = await models.load("org/a@v1", exact=True)
    assert loaded.options == ("--quant int8", "--max-rows 2"), "a flag of serve precedes the settings of the model"
    assert (await models.load("org/a@v1", flags=LoadFlags(quant="int4"), exact=True)).options[0] == "--quant int4"
    assert (await models.load("org/b", exact=True)).options == ()
    options = [worker.load_frame.options for worker in workers]
    assert [(option.quant, option.context, option.max_rows) for option in options] == [
        ("int8", 128, 2),
        ("int4", 128, 2),
        ("none", 128, 64),
    ]
    preferences.set_settings("org/c", {"quant": "int3"})
    with pytest.raises(ConfigError, match="quant in the settings of org/c"):
        await models.load("org/c")
    await models.close()


async def test_preloaded_models_are_loaded_at_the_start(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(name: str, allow_path: bool = False) -> ModelRef:
        if name == "missing":
            raise ModelNotFound("model 'missing' is not on this machine", hint="pull it")
        return ref(name)

    monkeypatch.setattr(loaded_models.resolved, "model", resolve)
    monkeypatch.setattr("localllm.app.daemon.names.find_model", lambda *_, **__: None)
    models = LoadedModels(Settings(preload=("missing", "a", "b")))
    await lifecycle._preload(models)
    assert [worker.model for worker in workers] == ["a", "b"]
    assert "cannot preload missing: model 'missing' is not on this machine (pull it)" in caplog.text
    await models.close()


async def test_worker_has_at_most_max_queue_requests(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings(max_queue=3))
    with pytest.raises(InvalidRequest) as refused:
        await models.open("a", [], weight=4)
    assert refused.value.param == "n"
    assert workers == [], "the model is not loaded for a request that no load could help"
    await models.open("a", [], weight=1)
    await models.open("a", [], weight=2)
    (worker,) = workers
    assert worker.unfinished == 3
    with pytest.raises(Overloaded):
        await models.open("a", [])
    worker.unfinished = 0
    await models.open("a", [], weight=3)
    models.stopping = True
    with pytest.raises(Stopping):
        await models.open("a", [], weight=1)
    await models.close()


async def test_request_loads_its_model(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings())
    requests: Any = [Generate(id="r")]
    assert await models.open("a", requests, weight=1) == requests
    assert await models.open(None, requests, weight=1) == requests, "without a name: the only loaded model"
    assert [(worker.model, worker.unfinished) for worker in workers] == [("a", 2)]
    with pytest.raises(ModelNotFound):
        await models.open("/b", requests)
    await models.open("/b", requests, local=True)
    assert (await models.load("/b", local=True)).id == "/b"
    await models.close()


async def test_name_of_a_model_precedes_the_name_of_an_adapter(workers: list[FakeWorker]) -> None:
    """The id `qwen3:0.6b` is a short name, even if the model qwen3 could have an adapter 0.6b."""
    models = LoadedModels(Settings())
    assert (await models.load("qwen3:0.6b")).id == "qwen3:0.6b"
    with pytest.raises(AdapterNotFound, match="qwen3 has no adapter '1b'"):
        await models.load("qwen3:1b")
    with pytest.raises(AdapterNotFound, match=r"qwen3:0\.6b has no adapter 'pirate'"):
        await models.load("qwen3:0.6b:pirate")
    await models.close()


async def test_request_without_a_name_uses_the_only_model(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings())
    with pytest.raises(InvalidRequest, match="none"):
        await models.open(None, [])
    assert models.find("a") is None
    first = await models.worker("a")
    assert models.find("a") is first
    await models.open(None, [])
    assert workers[0].unfinished == 1
    await models.worker("b")
    with pytest.raises(InvalidRequest, match="a, b"):
        await models.open(None, [])
    with pytest.raises(ModelNotFound) as unknown:
        await models.unload("c")
    assert unknown.value.hint == "loaded: a, b"
    await models.unload("b")
    await models.open(None, [])
    assert workers[0].unfinished == 2
    assert workers[1].quiet_for == [Developer().drain]
    assert str(workers[1].expected_end) == "b was unloaded"
    await models.close()
    assert str(workers[0].expected_end) == loaded_models.STOPPING


async def test_second_unload_waits_for_the_first(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings(developer=Developer(drain=2.0)))
    await models.worker("a")
    await asyncio.gather(models.unload("a"), models.unload("a"), models.close())
    assert workers[0].quiet_for == [2.0]
    assert models.find("a") is None


async def test_only_a_local_client_may_name_a_path(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings())
    for name in ("/a", "./a", "~"):
        with pytest.raises(ModelNotFound):
            await models.worker(name)
    assert (await models.worker("/a", local=True)).model == "/a"
    await models.close()


async def test_description_of_a_loaded_model(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings(idle_unload=100.0))
    await models.worker("a")
    (worker,) = workers
    worker.idle = 30.0
    (model,) = await models.loaded()
    assert (model.state, model.memory, model.cache_tokens, model.cache_used, model.token_bytes) == (
        "ready",
        120,
        7,
        0,
        50,
    )
    assert (model.idle, model.unload_in, model.warnings, model.requests, model.pid) == (30.0, 70.0, ("slow",), 0, 7)
    worker.statistics = Stats(id="s", running=1, waiting=0, cache_tokens=7, cache_used=5)
    worker.idle, worker.unfinished = 0.0, 2
    (model,) = await models.loaded()
    assert (model.cache_used, model.requests, model.unload_in) == (5, 2, None)
    worker.state = "over"
    assert await models.loaded() == []
    worker.state = "ready"
    await models.close()
    forever = LoadedModels(Settings(idle_unload=0))
    await forever.worker("a")
    (model,) = await forever.loaded()
    assert model.unload_in is None
    await forever.close()


@pytest.mark.parametrize(("limit", "pause"), [(2.0, 0.5), (900.0, 1.0)])
async def test_idle_models_are_unloaded(
    workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch, limit: float, pause: float
) -> None:
    pauses: asyncio.Queue[float] = asyncio.Queue()
    looks = asyncio.Semaphore(0)

    async def sleep(seconds: float) -> None:
        pauses.put_nowait(seconds)
        await looks.acquire()

    monkeypatch.setattr(loaded_models.asyncio, "sleep", sleep)
    models = LoadedModels(Settings(idle_unload=limit))
    await models.worker("a")
    await models.worker("b")
    workers[0].idle, workers[1].idle = limit, limit + 0.1
    async with asyncio.timeout(100):
        assert await pauses.get() == pause
        looks.release()
        assert await pauses.get() == pause, "one task checks all models again and again"
        await workers[1].process_gone.wait()
    assert (workers[0].state, workers[1].state) == ("ready", "over")
    workers[0].idle = limit - 0.1
    await models.open("a", [Generate(id="x", prompt="x")], lifetime=limit - 0.2)
    workers[0].unfinished = 0
    looks.release()
    async with asyncio.timeout(100):
        await workers[0].process_gone.wait()
    assert workers[1].quiet_for == [0.0]
    await models.close()
    assert models._idle_task is not None
    await asyncio.wait([models._idle_task], timeout=100)
    assert models._idle_task.cancelled()


async def test_unexpected_end_is_counted_and_delays_the_next_load(workers: list[FakeWorker]) -> None:
    """An end counts only if it was not requested and the worker was ready."""
    models = LoadedModels(Settings())
    for _ in range(2):
        worker: Any = await models.worker("a")
        worker.process_gone.set()
        worker.die()
    assert models.deaths == {"a": 2}
    workers[-1].process_gone.clear()
    coming = asyncio.create_task(models.worker("a"))
    await until_created(workers, 3)
    assert not coming.done()
    workers[1].process_gone.set()
    assert (await coming).state == "ready"
    assert models._ended == []
    await models.unload("a")
    FakeWorker.wait.clear()
    loading = asyncio.create_task(models.worker("a"))
    await until_created(workers, 4)
    workers[3].process_gone.set()
    workers[3].die()
    assert models.deaths == {"a": 2}
    FakeWorker.wait.set()
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_models_load_one_at_a_time(workers: list[FakeWorker]) -> None:
    FakeWorker.wait.clear()
    models = LoadedModels(Settings())
    first, second = (asyncio.create_task(models.worker(name)) for name in ("a", "b"))
    await until_created(workers, 2)
    (loading, waiting) = await models.loaded()
    assert (loading.state, waiting.state, loading.pid) == ("loading", "loading", 7)
    await models.unload("b")
    FakeWorker.wait.set()
    assert (await first).state == "ready"
    with pytest.raises(Stopping, match="ended"):
        await second
    assert workers[1].info is None, "the model was unloaded before its load began"
    await models.close()


async def test_drain_refuses_new_requests(workers: list[FakeWorker]) -> None:
    models = LoadedModels(Settings())
    await models.worker("a")
    await models.drain(3.0)
    assert workers[0].quiet_for == [3.0]
    with pytest.raises(Stopping):
        await models.worker("a")
    with pytest.raises(Stopping):
        await models.worker("b")
    assert len(workers) == 1
    await models.close()


async def test_progress_reaches_the_listener(workers: list[FakeWorker]) -> None:
    def tell(stage: str, done: float) -> None: ...

    models = LoadedModels(Settings())
    await models.worker("a")
    await models.worker("a", progress=tell)
    assert workers[0].listeners == [tell]
    await models.close()
