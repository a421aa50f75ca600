"""Adapters are loaded, replaced and unloaded while 16 requests run: no token is wrong, stale or lost."""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.engine import Engine
from localllm.engine.errors import RequestRefused
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.lora import Adapter
from localllm.engine.request import Delta, Request
from localllm.engine.runner import Runner, page_bytes

from . import canary
from .adapters import open_on
from .conformance import BUDGET, PAGE

STREAMS = 16
NAMES = 6  # more names than slots
SCALES = {0.0: False, 0.9: True, 1.0: True}  # whether the adapter decides the answer at this scale
OPTIONS = replace(
    BUDGET, max_rows=STREAMS, cache_bytes=150 * page_bytes(PAGE, 1, 64, 1, 4), adapter_slots=4, adapter_rank=canary.KEYS
)


@dataclass
class Answers:
    """The tokens of all requests. The thread of the engine adds them."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, str] = field(default_factory=dict)

    def add(self, deltas: list[Delta]) -> None:
        with self.changed:
            for delta in deltas:
                self.tokens[delta.request_id] += delta.tokens
                if delta.finish:
                    self.finishes[delta.request_id] = delta.finish
            self.changed.notify()

    def wait(self, max_running: int) -> None:
        """Wait until at most this number of requests run."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.tokens) - len(self.finishes) <= max_running, timeout=100)


class Swaps:
    """Random operations on an engine, and the answer that each request must give."""

    def __init__(self, engine: Engine, answers: Answers, folder: Path, seed: int) -> None:
        self.engine = engine
        self.expected: dict[str, list[int]] = {}
        self.refused = 0
        self._answers = answers
        self._folder = folder
        self._random = random.Random(seed)
        self._shifts: dict[Adapter, int] = {}
        self._loaded: dict[str, Adapter] = {}
        self._replaced: list[Adapter] = []

    def run(self, count: int) -> None:
        operations = [self.generate, self.load, self.unload, self.load_again, self.generate_stale]
        for _ in range(count):
            (operation,) = self._random.choices(operations, [12, 4, 1, 1, 1])
            operation()

    def load(self) -> None:
        """Load a new name, or replace the adapter of a name: its content is new each time."""
        name = f"adapter-{self._random.randrange(NAMES)}"
        shift = self._random.randrange(1, canary.KEYS)
        folder = canary.save_adapter(self._folder / str(len(self._shifts)), shift)
        config = folder / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "revision": str(len(self._shifts))}))
        adapter = Adapter(name, str(folder), read_adapter(folder).version)
        self.engine.register_adapter(adapter)
        if name in self._loaded:
            self._replaced.append(self._loaded[name])
        self._shifts[adapter] = shift
        self._loaded[name] = adapter

    def load_again(self) -> None:
        """Load the version of a name once more."""
        if self._loaded:
            self.engine.register_adapter(self._random.choice(list(self._loaded.values())))

    def unload(self) -> None:
        if self._loaded:
            adapter = self._random.choice(list(self._loaded.values()))
            assert self.engine.unregister_adapter(adapter.name)
            self._replaced.append(self._loaded.pop(adapter.name))

    def generate_stale(self) -> None:
        """A request for a version that was replaced or unloaded is refused."""
        if self._replaced:
            with pytest.raises(RequestRefused):
                self._submit(self._random.choice(self._replaced), 1.0)
            self.refused += 1

    def generate(self) -> None:
        """A request for the base model or for an adapter with any scale. It waits while all streams are in use."""
        adapter = self._random.choice([None, *self._loaded.values()])
        self._submit(adapter, 1.0 if adapter is None else self._random.choice(list(SCALES)))

    def generate_alone(self) -> None:
        """A request for the base model, so that the last step has no row with an adapter."""
        self._submit(None, 1.0)
        self._answers.wait(0)

    def unload_all(self) -> None:
        for name in list(self._loaded):
            self.engine.unregister_adapter(name)
        self._loaded.clear()

    def _submit(self, adapter: Adapter | None, scale: float) -> None:
        # Few prompts: an answer from the cache of another adapter, version or scale would be wrong.
        key = self._random.randrange(canary.KEYS)
        prompt = canary.prompt(key, 40, seed=key)
        count = self._random.randrange(1, 30)
        shift = self._shifts[adapter] if adapter is not None and SCALES[scale] else 0
        name = f"request-{len(self._answers.tokens)}"
        self._answers.wait(STREAMS - 1)
        self._answers.tokens[name] = []
        try:
            self.engine.submit(Request(name, tuple(prompt), count, adapter=adapter, adapter_scale=scale))
        except RequestRefused:
            del self._answers.tokens[name]
            raise
        self.expected[name] = canary.walk(canary.under(prompt, shift), count)


@contextmanager
def started(engine: Engine) -> Iterator[None]:
    engine.start()
    yield
    engine.close()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "operations"),
    [
        ("cpu", 200),
        pytest.param("mlx", 60, marks=pytest.mark.real_otherdevice),
        pytest.param("cpu", 1000, marks=SLOW),
        pytest.param("mlx", 1000, marks=[SLOW, pytest.mark.real_otherdevice, pytest.mark.timeout(300)]),
    ],
)
def test_adapters_change_while_requests_run(tmp_path: Path, backend: str, operations: int) -> None:
    runner = open_on(backend, canary.save(tmp_path), OPTIONS)
    answers = Answers()
    engine = Engine(runner, answers.add)
    swaps = Swaps(engine, answers, tmp_path, seed=operations)
    with started(engine):
        swaps.run(operations // 2)
        swaps.unload_all()
        answers.wait(0)
        tensors = live_tensors()
        swaps.run(operations // 2)
        swaps.unload_all()
        answers.wait(0)
        swaps.generate_alone()
        assert live_tensors() <= tensors + 10, "an adapter that is unloaded still has memory"
        assert answers.tokens == swaps.expected
        assert set(answers.finishes.values()) == {"length"}
        assert swaps.refused
        check_nothing_is_left(engine, runner)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def check_nothing_is_left(engine: Engine, runner: Runner) -> None:
    """Memory does not grow with the number of adapters that were loaded."""
    slots = runner._slots if isinstance(runner, TorchRunner) else runner._adapters  # type: ignore[attr-defined]
    assert not slots._prepared
    pool = engine._adapters
    assert sorted(pool._empty) == list(range(1, OPTIONS.adapter_slots + 1))
    assert not any(
        [
            pool._registered,
            pool._requests,
            pool._users,
            pool._unused,
            pool._slots,
            pool._pinned,
            pool._loading,
            pool._errors,
        ]
    )
    cache = engine._scheduler._cache
    cache.evict_all()
    assert len(cache._tree._roots) <= 1, "only the last request may keep its namespace"
