"""Clients that load one model with other options at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from localllm.app.api.admin import LoadedModel, LoadFlags
from localllm.app.config import Settings
from localllm.app.daemon import models as loaded_models
from localllm.app.daemon.models import LoadedModels
from localllm.app.errors import AppError, InvalidRequest, ModelUnusable, Stopping
from localllm.app.frames import Load, ModelInfo
from localllm.app.store.local.refs import ModelRef

from ..samples import model_info

FLAGS = (LoadFlags(), LoadFlags(quant="int8"), LoadFlags(quant="int4"), LoadFlags(context=64))
SEEDS = range(150)


class Random:
    """Suspends a task so often that every order of the tasks occurs with some seed."""

    seed = random.Random(0)

    @classmethod
    async def pause(cls) -> None:
        for _ in range(cls.seed.choice((0, 0, 1, 2, 3, 7))):
            await asyncio.sleep(0)


class Worker:
    """A worker without a process, whose loads, ends and statistics take random times."""

    def __init__(self, load: Load, *, on_over: Callable[[Any], None], **_: Any) -> None:
        self.load_frame = load
        self.model = load.model
        self.on_over = on_over
        self.state = "loading"
        self.info: ModelInfo | None = None
        self.listeners: list[Any] = []
        self.expected_end: AppError | None = None
        self.end_error = Stopping("ended")
        self.unfinished = 0
        self.idle = 0.0
        self.pid = id(self)

    async def start(self) -> ModelInfo:
        await Random.pause()
        if self.state == "over":
            raise self.end_error
        if self.load_frame.options.quant == "fp8":
            await self.stop(ModelUnusable("no fp8"))
            raise ModelUnusable("no fp8")
        self.info = structs.replace(model_info(), model=self.model, quant=self.load_frame.options.quant)
        self.state = "ready"
        return self.info

    def open(self, requests: Any, weight: int) -> Any:
        if self.state != "ready":
            raise self.end_error
        self.unfinished += weight
        return SimpleNamespace(worker=self)

    async def stats(self, seconds: float) -> None:
        await Random.pause()

    async def wait_idle(self, seconds: float) -> None:
        await Random.pause()

    async def wait_gone(self) -> None:
        await Random.pause()

    async def stop(self, error: AppError) -> None:
        self.expected_end = error
        await Random.pause()
        self.state = "over"
        self.on_over(self)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Callable[[], LoadedModels]:
    def ref(name: str, allow_path: bool = False) -> ModelRef:
        return ModelRef(id=name, path=Path("/") / name)

    async def at_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    monkeypatch.setattr(loaded_models, "WorkerProcess", Worker)
    monkeypatch.setattr(loaded_models.resolved, "model", ref)
    monkeypatch.setattr("localllm.app.daemon.names.find_model", ref)
    monkeypatch.setattr(loaded_models.asyncio, "to_thread", at_once)
    return lambda: LoadedModels(Settings())


def requested(flags: LoadFlags) -> tuple[str, ...]:
    """The options that a load with these flags reports."""
    values = {name: value for name, value in structs.asdict(flags).items() if value is not None}
    return tuple(f"--{name} {value}" for name, value in values.items())


@pytest.mark.parametrize("exact", [True, False])
async def test_load_reports_its_own_options(models: Callable[[], LoadedModels], exact: bool) -> None:
    for seed in SEEDS:
        Random.seed = random.Random(seed)
        shared = models()

        async def load(flags: LoadFlags, shared: LoadedModels = shared) -> tuple[LoadFlags, LoadedModel]:
            await Random.pause()
            return flags, await shared.load("a", flags=flags, exact=exact)

        callers = [load(Random.seed.choice(FLAGS)) for _ in range(4)]
        for flags, result in await asyncio.gather(*callers):
            is_requested = set(requested(flags)) <= set(result.options)
            if exact:
                is_requested = requested(flags) == result.options
            assert is_requested or result.kept, (seed, flags, result.options)
        await shared.close()


async def test_answer_has_the_options_of_its_request_or_is_refused(models: Callable[[], LoadedModels]) -> None:
    outcomes = set()
    for seed in SEEDS:
        Random.seed = random.Random(seed)
        shared = models()

        async def chat(flags: LoadFlags, shared: LoadedModels = shared) -> str:
            await Random.pause()
            await shared.load("a", flags=flags, exact=True)
            await Random.pause()
            try:
                stream: Any = await shared.open("a", [], flags=flags)
            except InvalidRequest:
                return "refused"
            options = stream.worker.load_frame.options
            assert (options.quant, options.context) == (flags.quant or "none", flags.context)
            await Random.pause()
            stream.worker.unfinished -= 1
            return "answered"

        async def patient(flags: LoadFlags) -> str:
            with suppress(InvalidRequest):
                return await chat(flags)
            return "refused at the load"

        outcomes.update(await asyncio.gather(*(patient(Random.seed.choice(FLAGS)) for _ in range(4))))
        await shared.close()
    assert {"answered", "refused"} <= outcomes


async def test_failed_options_of_another_call_do_not_fail_this_call(models: Callable[[], LoadedModels]) -> None:
    for seed in SEEDS:
        Random.seed = random.Random(seed)
        shared = models()

        async def load(quant: Any, shared: LoadedModels = shared) -> LoadedModel:
            await Random.pause()
            return await shared.load("a", flags=LoadFlags(quant=quant), exact=True)

        bad, plain, same = await asyncio.gather(load("fp8"), load(None), load("fp8"), return_exceptions=True)
        assert isinstance(bad, ModelUnusable), (seed, bad)
        assert isinstance(same, ModelUnusable), (seed, same)
        assert isinstance(plain, LoadedModel), (seed, plain)
        await shared.close()
