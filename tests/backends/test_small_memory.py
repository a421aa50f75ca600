"""Devices with little memory: the workspace is measured, the largest context is chosen, and hints name options that
fit. The device is the CPU with a limit for torch's tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.backends.cpu.device import DEVICE as CPU
from localllm.backends.pytorch import opening, quant, weights
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.loading import Loader
from localllm.backends.pytorch.memory_plan import number_of_graphs
from localllm.backends.pytorch.models.llama import build
from localllm.backends.pytorch.opening import open_runner, plan_memory
from localllm.backends.pytorch.quant import floats
from localllm.backends.pytorch.slot_memory import DeviceMemory
from localllm.engine.errors import ModelTooLarge
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops

from .batches import Row, make_batch
from .capped import CappedMemory
from .tape import Tape
from .tiny import Tiny

MIB = 2**20
SLICE = 2**15  # values of a weight that are converted at a time
CONTEXT = 16_384
OPTIONS = LoadOptions(max_rows=4, adapter_slots=0)
EVERYTHING = 2**40  # bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A random model with a context whose KV cache is larger than its weights."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
    }
    folder = tmp_path_factory.mktemp("model")
    Tiny("llama", "llama", shape).save(folder)
    return read_model(folder)


def device_with(memory: CappedMemory, device: Device = CPU) -> Device:
    return replace(device, cache_share=0.5, context_share=0.95, row_tokens=None, meter=memory.meter)


def opened(files: ModelFiles, options: LoadOptions, memory: CappedMemory, device: Device = CPU) -> Runner:
    memory.release()
    return open_runner(files, options, device_with(memory, device), memory.free())


def run_largest_steps(runner: Runner) -> None:
    spec = runner.spec
    pages = list(range(1, spec.groups[0].num_pages + 1))
    length = min(spec.max_tokens, spec.max_context)
    prompt = Row([5] * length, 0, pages[: -(-length // spec.groups[0].page_size)])
    runner.run(make_batch([prompt], spec.vocab_size)).result()
    row = Row([5], spec.max_context - 1, pages[: -(-spec.max_context // spec.groups[0].page_size)])
    runner.run(make_batch([row] * spec.max_rows, spec.vocab_size)).result()


def smallest_limit(files: ModelFiles, options: LoadOptions) -> int:
    """The bytes of weights and expected workspace: a smaller device refuses the model."""
    plan = plan_memory(files, options, device_with(CappedMemory(EVERYTHING)), EVERYTHING)
    return plan.weights + plan.workspace


@pytest.mark.parametrize("extra", [MIB, 3 * MIB])
def test_largest_context_is_chosen_and_its_steps_fit(files: ModelFiles, extra: int) -> None:
    memory = CappedMemory(smallest_limit(files, OPTIONS) + extra)
    with memory:
        runner = opened(files, OPTIONS, memory)
        spec = runner.spec
        assert 0 < spec.max_context < CONTEXT
        (warning,) = spec.warnings
        assert warning == (
            f"the memory has room for a context of {spec.max_context} tokens; the model supports {CONTEXT}"
        )
        run_largest_steps(runner)
        assert memory.peak <= memory.limit
        assert memory.peak >= 0.8 * memory.limit, "most of the memory is used"
        runner.close()


@pytest.mark.parametrize("slots", [0, 4])
def test_later_steps_have_memory_that_no_other_program_can_take(files: ModelFiles, slots: int) -> None:
    """After the load another program takes all memory that is free."""
    options = replace(OPTIONS, adapter_slots=slots, context=1024)
    memory = CappedMemory(smallest_limit(files, options) + 4 * MIB)
    with memory:
        runner = opened(files, options, memory)
        assert bool(runner.spec.num_adapters) == bool(slots)
        memory.limit -= memory.free()
        run_largest_steps(runner)
        runner.close()


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The measured workspaces of all loads of a test."""
    measured = []

    def measure(*arguments: Any) -> int:
        measured.append(inner(*arguments))
        return measured[-1]

    inner = opening.measured_workspace
    monkeypatch.setattr(opening, "measured_workspace", measure)
    return measured


def test_captured_graphs_have_a_workspace_of_their_own(
    files: ModelFiles, workspaces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder does not use the memory of steps without graphs, and each graph needs memory."""
    monkeypatch.setattr(opening, "MEASURED_BELOW", EVERYTHING)
    monkeypatch.setattr(opening, "GraphRunner", lambda runner, *_: runner)
    taped = replace(CPU, ops=Ops(), recorder=Tape, graphs="breakable")
    graphs: Graphs
    sizes = []
    for graphs, graph_bytes in (("off", 1000), ("breakable", 0), ("breakable", 1000)):
        memory = CappedMemory(EVERYTHING)
        device = device_with(memory, taped)
        device = replace(device, meter=replace(memory.meter, graph=graph_bytes))
        with memory:
            runner = open_runner(files, replace(OPTIONS, graphs=graphs, context=512), device, EVERYTHING)
            sizes.append((len(runner.spec.graph_rows), len(runner.spec.graph_tokens)))
            runner.close()
    assert workspaces[1] == pytest.approx(2 * workspaces[0], rel=0.2)
    rows, tokens = sizes[2]
    assert workspaces[2] - workspaces[1] == 1000 * (rows + tokens * (files.config.num_layers + 1))


def test_memory_that_steps_keep_is_not_workspace(
    files: ModelFiles, workspaces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps load kernels and libraries. The free memory after them is smaller, and the workspace is not
    larger."""
    monkeypatch.setattr(opening, "MEASURED_BELOW", EVERYTHING)
    kept: list[torch.Tensor] = []
    embedding = CPU.ops.linear.embedding

    def load_library(*arguments: Any) -> torch.Tensor:
        if not kept:
            kept.append(torch.zeros(MIB, dtype=torch.uint8))
        return embedding(*arguments)

    for op in (embedding, load_library):
        memory = CappedMemory(EVERYTHING)
        device = replace(CPU, ops=replace(CPU.ops, linear=replace(CPU.ops.linear, embedding=op)))
        with memory:
            opened(files, OPTIONS, memory, device).close()
    assert kept
    assert workspaces[0] == pytest.approx(workspaces[1], abs=MIB // 8)


def test_workspace_has_room_for_steps_with_adapters(
    files: ModelFiles, workspaces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LoRA products of this device need two MiB more than they do; captured steps with adapters have graphs."""
    monkeypatch.setattr(opening, "MEASURED_BELOW", EVERYTHING)
    monkeypatch.setattr(opening, "GraphRunner", lambda runner, *_: runner)
    calls = 0

    def add(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        scratch = torch.zeros(2 * MIB, dtype=torch.uint8)
        assert len(scratch)
        return Ops().lora.add(*arguments)

    ops = Ops()
    taped = replace(CPU, ops=replace(ops, lora=replace(ops.lora, add=add)), recorder=Tape, graphs="breakable")
    graphs = 0
    for slots in (0, 2):
        memory = CappedMemory(EVERYTHING)
        device = replace(device_with(memory, taped), meter=replace(memory.meter, graph=1000))
        options = replace(OPTIONS, graphs="breakable", context=512, adapter_slots=slots)
        with memory:
            runner = open_runner(files, options, device, EVERYTHING)
            spec = runner.spec
            graphs = number_of_graphs(spec.graph_rows, spec.graph_tokens, files.config.num_layers)
            runner.close()
        assert bool(calls) == bool(slots)
    assert workspaces[1] - workspaces[0] >= 2 * 2 * MIB + 1000 * graphs


def test_workspace_is_measured_only_if_memory_is_short(files: ModelFiles, workspaces: list[int]) -> None:
    memory = CappedMemory(EVERYTHING)
    with memory:
        opened(files, OPTIONS, memory).close()
    assert not workspaces
    memory = CappedMemory(smallest_limit(files, OPTIONS) + MIB)
    with memory:
        opened(files, OPTIONS, memory).close()
    assert len(workspaces) == 1
    assert 0.2 * MIB < workspaces[0] < 16 * MIB


@pytest.mark.parametrize("context", [None, CONTEXT])
def test_hints_of_a_refused_load_fit(files: ModelFiles, context: int | None) -> None:
    """The flags in the hint are used on the same device, which then loads the model."""
    options = replace(OPTIONS, context=context)
    sizes = [smallest_limit(files, replace(OPTIONS, quant=name)) for name in ("none", "int8", "int4")]  # type: ignore[arg-type]
    hinted = set()
    for limit in range(sizes[2] - MIB // 4, sizes[0] + 5 * MIB, 2 * MIB):
        memory = CappedMemory(limit)
        with memory:
            try:
                opened(files, options, memory).close()
            except ModelTooLarge as error:
                hint, numbers = error.hint, error.numbers
            else:
                continue
            assert numbers["free_bytes"] == limit
            assert numbers["weight_bytes"] > 0
            for quant_name, tokens in re.findall(r"--quant (\w+)(?: --context (\d+))?", hint):
                hinted.add((quant_name, bool(tokens)))
                changed = replace(options, quant=quant_name, context=int(tokens) if tokens else context)
                opened(files, changed, memory).close()
            for tokens in re.findall(r"with --context (\d+)", hint):
                hinted.add(("", True))
                opened(files, replace(options, context=int(tokens)), memory).close()
    assert {name for name, _ in hinted} >= {"int8", "int4"}
    if context is not None:
        assert ("", True) in hinted


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["none", "int8", "int4", "fp8"])
def test_load_never_holds_two_copies_of_a_weight(
    name: Quant, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each moment of a load, the device has at most the loaded weights and one slice: its stored values, their
    float32 copies if the device quantises them, and its packed values."""
    equal = torch.equal
    monkeypatch.setattr(quant, "SLICE_VALUES", SLICE)
    monkeypatch.setattr(weights, "SLICE_VALUES", SLICE)
    monkeypatch.setattr(floats, "check_finite", lambda *_: None)  # these tensors have no values
    monkeypatch.setattr(torch, "equal", lambda one, other: other.device.type == "meta" or equal(one, other))
    shape = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 16384}
    Tiny("llama", "llama", {**shape, "tie_word_embeddings": tied}).save(tmp_path, torch.bfloat16)
    files = read_model(tmp_path)
    device = replace(CPU, type="meta", ops=Ops(), slot_memory=DeviceMemory)
    loader = Loader(files, replace(OPTIONS, quant=name), device, torch.bfloat16)
    memory = CappedMemory(EVERYTHING, "meta")
    with memory, torch.inference_mode():
        _, loaded = loader.load(lambda weights: build(weights, files.config, 16), 0)
        assert loaded.bytes == pytest.approx(memory.live(), rel=0.02)
    assert loaded.bytes == pytest.approx(loader.expected_bytes(), rel=0.05)
    assert loaded.token_bytes == pytest.approx(loader.expected_token_bytes(), rel=0.05)
    value_bytes = 4 if name == "none" else 13
    largest = value_bytes * SLICE + 1024
    assert memory.peak - loaded.bytes <= largest
    stored = 16384 * 128 * torch.bfloat16.itemsize
    assert largest < stored / 4, "two copies of a weight would be noticed"
