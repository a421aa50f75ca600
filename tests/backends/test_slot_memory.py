"""The memory of adapter slots: allocated with the first adapter, and filled beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.backends.pytorch.slot_memory import DeviceMemory, MainMemory, SlotMemory
from localllm.engine.engine import Engine
from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.request import Request

from . import canary
from .conformance import BUDGET

OPTIONS = replace(BUDGET, adapter_slots=2, adapter_rank=canary.KEYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    canary.save(folder)
    canary.save_adapter(folder / "adapter", 2)
    return folder


def opened(folder: Path, memory: Callable[[Device], SlotMemory]) -> TorchRunner:
    runner = open_runner(read_model(folder), OPTIONS, replace(DEVICE, slot_memory=memory), 2**31)
    assert isinstance(runner, TorchRunner)
    return runner


def adapter_of(folder: Path) -> Adapter:
    return Adapter("poet", str(folder / "adapter"), read_adapter(folder / "adapter").version)


@pytest.mark.parametrize("memory", [MainMemory, DeviceMemory])
def test_slots_are_allocated_with_the_first_adapter(folder: Path, memory: Callable[[Device], SlotMemory]) -> None:
    runner = opened(folder, memory)
    slots = runner._slots
    assert slots is not None
    assert slots._pool is None
    prompt = canary.prompt(1, 40, seed=1)
    engine = Engine(runner)
    adapter = adapter_of(folder)
    tokens: dict[str, list[int]] = {"base": [], "adapter": []}
    engine.submit(Request("base", tuple(prompt), 20))
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.tokens
    assert slots._pool is None
    engine.register_adapter(adapter)
    assert slots._pool is not None
    engine.submit(Request("adapter", tuple(prompt), 20, adapter=adapter))
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.tokens
    assert tokens == {"base": canary.walk(prompt, 20), "adapter": canary.walk(canary.under(prompt, 2), 20)}
    engine.close()


def test_an_adapter_is_refused_by_name_if_memory_for_slots_is_short(folder: Path) -> None:
    class Full(DeviceMemory):
        def allocate(self, slots: int, values: int, dtype: torch.dtype) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    engine = Engine(opened(folder, Full))
    with pytest.raises(ModelRefused, match="adapter poet does not fit into the device memory") as refused:
        engine.register_adapter(adapter_of(folder))
    assert "smaller cache" in refused.value.hint
    assert engine.adapters == ()
    engine.close()


def test_an_adapter_is_refused_by_name_if_the_model_has_no_slots(folder: Path) -> None:
    files = read_model(folder)
    runner = open_runner(files, replace(OPTIONS, cache_bytes=2**21), DEVICE, files.weight_bytes * 2 + 2**21)
    assert runner.spec.num_adapters in (0, 1, 2)
    runner = open_runner(files, replace(OPTIONS, cache_bytes=2**31), DEVICE, 2**30)
    with pytest.raises(ModelRefused, match="adapter poet: the model was loaded without adapter slots") as refused:
        runner.prepare_adapter(adapter_of(folder))
    assert "set cache_mib or adapter_rank to a smaller value" in refused.value.hint


def test_copies_to_a_device_have_a_queue_of_their_own() -> None:
    streams: list[object] = []
    used: list[object] = []

    def new_stream() -> object:
        streams.append(torch.cpu.Stream())
        return streams[-1]

    def stream(queue: Any) -> Any:
        used.append(queue)
        return torch.cpu.stream(queue)

    module = SimpleNamespace(Stream=new_stream, stream=stream, Event=DEVICE.module.Event)
    memory = DeviceMemory(replace(DEVICE, module=cast(Any, module)))
    pool = memory.allocate(2, 8, torch.float32)
    assert streams == [], "without a load there is no second queue"
    buffer = memory.buffer(8, torch.float32)
    buffer.fill_(3.0)
    for slot in range(2):
        memory.copy(pool[slot], buffer)
    assert used == [streams[0]] * 2
    assert len(streams) == 1
    assert (pool == 3.0).all()
