"""Failures of a device, and the errors that the engine gets."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from localllm.backends import cuda
from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch import opening
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.failures import failures, load_failures
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchPending, TorchRunner
from localllm.engine.errors import EngineError, ModelRefused, OutOfMemory, RunnerFailed
from localllm.engine.files.model_files import read_model
from localllm.engine.options import Graphs
from localllm.engine.runner import DeviceInfo, Runner
from localllm.kernels.ops.layer import Layer

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, Conversation
from .tape import Tape

GPU = pytest.mark.skipif(not isinstance(cuda.probe(), DeviceInfo), reason="no NVIDIA GPU")

NO_MEMORY = """CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which \
1.00 MiB is free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"""
ILLEGAL = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
"""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (torch.OutOfMemoryError(NO_MEMORY), OutOfMemory, "it broke: CUDA out of memory. Tried to allocate 20.00 MiB"),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), OutOfMemory, "it broke: CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OutOfMemory, "CUBLAS_STATUS_ALLOC_FAIL"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory, "Triton Error"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), OutOfMemory, "CPUAlloc"),
        (MemoryError(), OutOfMemory, "it broke: MemoryError"),
        (torch.AcceleratorError(ILLEGAL), RunnerFailed, "it broke: CUDA error: an illegal memory access was encounter"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), RunnerFailed, "illegal"),
        (IndexError("index 7 is out of bounds"), RunnerFailed, "it broke: index 7"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)
def test_torch_errors_are_translated(error: Exception, kind: type[EngineError], text: str) -> None:
    with pytest.raises(kind) as raised, failures("it broke"):
        raise error
    assert text in str(raised.value)
    assert "PYTORCH_ALLOC_CONF" not in str(raised.value)
    assert "GPU 0" not in str(raised.value), "two sentences are enough"
    assert "stacktrace" not in str(raised.value)
    assert raised.value.__cause__ is error


def test_other_errors_are_not_translated() -> None:
    with pytest.raises(KeyError), failures("it broke"):
        raise KeyError("no such row")
    for error in (KeyError("out of memory"), RuntimeError("no such layer")):
        with pytest.raises(type(error)), load_failures("it"):
            raise error


@pytest.mark.parametrize("telling", [failures, load_failures])
def test_failed_step_frees_its_tensors_at_once(telling: type[failures] | type[load_failures]) -> None:
    """The memory is free before Python's garbage collector runs: the next step needs it."""

    def step(big: set[str]) -> None:
        with telling("it broke"):
            raise torch.OutOfMemoryError(NO_MEMORY)

    def failing() -> weakref.ref[set[str]]:
        big = set[str]()
        reference = weakref.ref(big)
        with pytest.raises(EngineError):
            step(big)
        return reference

    gc.disable()
    try:
        assert failing()() is None
    finally:
        gc.enable()


@dataclass
class Faulty:
    """The first op of every step. It raises the error that `fails` returns for the step."""

    inner: Callable[..., Tensor]
    fails: Callable[[int], Exception | None] = lambda _: None

    def __call__(self, tokens: Tensor, *more: Any) -> Tensor:
        error = self.fails(len(tokens))
        if error is not None:
            raise error
        return self.inner(tokens, *more)


def without_memory(max_tokens: int, after: int = 0) -> Callable[[int], Exception | None]:
    """Out of memory for steps with more than this number of tokens, after `after` calls without an error."""
    gone: Counter[int] = Counter()

    def fails(tokens: int) -> Exception | None:
        gone[tokens] += 1
        return torch.OutOfMemoryError(NO_MEMORY) if tokens > max_tokens and gone[tokens] > after else None

    return fails


def without_memory_on_gpu(max_tokens: int, after: int = 0) -> Callable[[int], Exception | None]:
    """Out of memory from the allocator of the GPU."""
    fails = without_memory(max_tokens, after)

    def allocate(tokens: int) -> None:
        if fails(tokens) is not None:
            torch.empty(2**60, dtype=torch.uint8, device="cuda")

    return allocate


def faulty(device: Device) -> tuple[Device, Faulty]:
    first = Faulty(device.ops.linear.embedding)
    linear = replace(device.ops.linear, embedding=first)
    return replace(device, ops=replace(device.ops, linear=linear, layer=Layer())), first


@pytest.fixture(params=["plain", "taped"])
def device(request: pytest.FixtureRequest) -> tuple[Device, Faulty]:
    return faulty(DEVICE if request.param == "plain" else replace(DEVICE, recorder=Tape, graphs="breakable"))


def opened(device: Device, tmp_path: Path) -> Runner:
    budget = replace(BUDGET, max_step_tokens=64)
    return open_runner(read_model(canary.save(tmp_path)), budget, device, 2**30)


def answers_are_right(runner: Runner) -> None:
    talk = Conversation(runner)
    prompts = [canary.prompt(key % canary.KEYS, 30 + key, seed=key) for key in range(10)]
    for number, prompt in enumerate(prompts):
        talk.submit(str(number), prompt, 10)
    talk.finish()
    for number, prompt in enumerate(prompts):
        assert talk.tokens[str(number)] == canary.walk(prompt, 10)


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_step_ends_only_its_requests(
    device: tuple[Device, Faulty], tmp_path: Path, overlap: bool
) -> None:
    device_record, first = device
    talk = Conversation(opened(replace(device_record, overlap=overlap, recorder=None), tmp_path))
    prompts = {name: canary.prompt(key, 30, seed=key) for key, name in enumerate("abcd")}
    talk.submit("a", prompts["a"], 12)
    talk.submit("b", prompts["b"], 12)
    for _ in range(4):
        talk.step()
    first.fails = without_memory(20)
    talk.submit("c", prompts["c"], 12)
    talk.step()
    first.fails = without_memory(10**6)
    talk.submit("d", prompts["c"], 12)
    talk.finish()
    assert talk.finishes == {"a": "no_memory", "b": "no_memory", "c": "no_memory", "d": "length"}
    for name in "ab":
        assert len(talk.tokens[name]) >= 3
        assert talk.tokens[name] == canary.walk(prompts[name], len(talk.tokens[name]))
    assert talk.tokens["d"] == canary.walk(prompts["c"], 12)


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_answers_end_only_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    talk = Conversation(opened(replace(DEVICE, overlap=overlap, recorder=None), tmp_path))
    prompt, fetched = canary.prompt(1, 30, seed=1), TorchPending._sample_values
    talk.submit("a", prompt, 12)
    for _ in range(4):
        talk.step()

    def short(*_: Any) -> Any:
        monkeypatch.setattr(TorchPending, "_sample_values", fetched)
        raise MemoryError

    monkeypatch.setattr(TorchPending, "_sample_values", short)
    talk.step()
    talk.submit("b", prompt, 12)
    talk.finish()
    assert talk.finishes == {"a": "no_memory", "b": "length"}
    assert talk.tokens["a"] == canary.walk(prompt, 12)[: len(talk.tokens["a"])]
    assert talk.tokens["b"] == canary.walk(prompt, 12)


def test_broken_device_raises_runner_failed(device: tuple[Device, Faulty], tmp_path: Path) -> None:
    device_record, first = device
    runner = opened(replace(device_record, recorder=None), tmp_path)
    first.fails = lambda _: torch.AcceleratorError(ILLEGAL)
    with pytest.raises(RunnerFailed, match="the step failed: CUDA error: an illegal memory access"):
        runner.run(make_batch([Row(canary.prompt(1, 30, seed=1), 0, range(1, 5))], canary.VOCAB))


@pytest.mark.parametrize("after", [0, 1], ids=["before", "while"])
@pytest.mark.parametrize(
    ("max_tokens", "rows", "tokens"), [(5, (1, 2, 4), (4,)), (40, (1, 2, 4, 8, 12), None), (0, (), ())]
)
def test_sizes_that_do_not_fit_run_without_graphs(
    tmp_path: Path, max_tokens: int, rows: tuple[int, ...], tokens: tuple[int, ...] | None, after: int
) -> None:
    """The error comes before the capture or during the capture."""
    device_record, first = faulty(replace(DEVICE, recorder=Tape, graphs="breakable"))
    first.fails = without_memory(max_tokens, after)
    runner = opened(device_record, tmp_path)
    assert runner.spec.graph_rows == rows
    assert runner.spec.graph_tokens == (tokens if tokens is not None else tuple(range(4, 33, 4)))
    [warning] = runner.spec.warnings
    assert "not enough memory to capture" in warning
    assert not _get_current_dispatch_mode_stack(), "a tape still runs"
    first.fails = lambda _: None
    answers_are_right(runner)


@GPU
@pytest.mark.parametrize("after", [0, 1], ids=["before", "while"])
@pytest.mark.parametrize("max_tokens", [5, 40, 0])
def test_gpu_runs_without_sizes_that_do_not_fit(tmp_path: Path, max_tokens: int, after: int) -> None:
    """After a failed capture, the stream and the memory pool can be used."""
    from localllm.backends.cuda.device import DEVICE as ON_GPU

    device_record, first = faulty(ON_GPU)
    first.fails = without_memory_on_gpu(max_tokens, after)
    runner = opened(device_record, tmp_path)
    assert runner.spec.graph_rows == tuple(rows for rows in (1, 2, 4, 8, 12) if rows <= max_tokens)
    assert runner.spec.graph_tokens == tuple(tokens for tokens in range(4, 33, 4) if tokens <= max_tokens)
    assert "not enough memory to capture" in runner.spec.warnings[-1]
    first.fails = lambda _: None
    for _ in range(2):
        answers_are_right(runner)


def test_model_without_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="does not fit into the device memory") as refused:
        open_runner(read_model(canary.save(tmp_path)), replace(BUDGET, cache_bytes=2**60), DEVICE, 2**30)
    assert "set cache_mib to" in refused.value.hint


@GPU
def test_model_without_gpu_memory_is_refused(tmp_path: Path) -> None:
    """The next model loads."""
    files = read_model(canary.save(tmp_path))
    with pytest.raises(ModelRefused, match="CUDA out of memory"):
        cuda.open(files, replace(BUDGET, cache_bytes=2**45))
    answers_are_right(cuda.open(files, BUDGET))


def test_device_failure_while_loading_raises_runner_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(opening, "PagedKV", broken)
    with pytest.raises(RunnerFailed, match=r"failed while loading .*: CUDA error: an illegal memory access"):
        open_runner(read_model(canary.save(tmp_path)), BUDGET, DEVICE, 2**30)


def test_other_errors_while_loading_are_not_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PagedKV", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        open_runner(read_model(canary.save(tmp_path)), BUDGET, DEVICE, 2**30)


@GPU
def test_out_of_memory_step_on_a_gpu(tmp_path: Path) -> None:
    from localllm.backends.cuda.device import DEVICE as ON_GPU

    device_record, first = faulty(replace(ON_GPU, recorder=None))
    runner = opened(device_record, tmp_path)
    talk = Conversation(runner)
    for _ in range(5):
        first.fails = without_memory_on_gpu(0, after=1)
        talk.submit("a", canary.prompt(1, 30, seed=1), 60)
        talk.finish()
        assert talk.finishes["a"] == "no_memory"
        first.fails = lambda _: None
        answers_are_right(runner)


@GPU
def test_opening_many_models_leaks_no_memory(tmp_path: Path) -> None:
    """The memory of the GPU and of the process does not grow after the first models."""
    files = read_model(canary.save(tmp_path))
    free, process_bytes = [], []
    for _ in range(24):
        runner = cuda.open(files, BUDGET)
        answers_are_right(runner)
        runner.close()
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        result = cuda.probe()
        assert isinstance(result, DeviceInfo)
        free.append(result.free)
        process_bytes.append(psutil.Process().memory_info().rss)
    print("\nGPU MiB:", [value >> 20 for value in free], "own MiB:", [value >> 20 for value in process_bytes])
    assert min(free[4:]) >= free[3] - 2**22
    assert max(process_bytes[4:]) <= process_bytes[3] + 2**25


@pytest.mark.parametrize("graphs", ["off", "full", "breakable"])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "short of memory"])
def test_closed_runner_has_no_references(tmp_path: Path, graphs: Graphs, fails: bool) -> None:
    """No cache and no handled error references the memory of a closed model."""
    device_record, first = faulty(replace(DEVICE, recorder=Tape, graphs=graphs))
    if fails:
        first.fails = without_memory(5, after=1)
    runner = opened(device_record, tmp_path)
    first.fails = lambda _: None
    answers_are_right(runner)
    inner = runner._inner if isinstance(runner, GraphRunner) else runner
    assert isinstance(inner, TorchRunner)
    references = weakref.ref(inner.kv), weakref.ref(inner.model)
    runner.close()
    del runner, inner
    gc.collect()
    assert [each() for each in references] == [None, None]


def test_failed_capture_is_not_out_of_memory(tmp_path: Path) -> None:
    device_record, first = faulty(replace(DEVICE, recorder=Tape))
    first.fails = lambda _: torch.AcceleratorError(ILLEGAL)
    with pytest.raises(RunnerFailed, match="capturing a step failed"):
        opened(device_record, tmp_path)


def test_there_is_no_warning_when_every_size_is_captured(tmp_path: Path) -> None:
    device_record, _ = faulty(replace(DEVICE, recorder=Tape))
    assert opened(device_record, tmp_path).spec.warnings == ()
