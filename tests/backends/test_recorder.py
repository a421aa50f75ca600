"""The recorders of CUDA and XPU graphs, with a fake of torch's module that refuses wrong calls; and the tape of the CPU
tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from localllm.backends.pytorch.device import NO_ROWS
from localllm.backends.pytorch.graphs import recorder
from localllm.backends.pytorch.graphs.cuda import CudaRecorder
from localllm.backends.pytorch.graphs.recorder import GraphRecorder
from localllm.backends.xpu.recorder import XpuRecorder

from .tape import Tape


@dataclass
class Touchy:
    """A fake of the functions of torch.cuda or torch.xpu that the recorder calls. `make`: the recorder."""

    make: type[GraphRecorder]
    current: str = "main"
    recording_on: str = ""  # the stream that is being recorded
    alive: dict[int, int] = field(default_factory=dict)  # pool -> recordings that hold it; 0: all are gone
    broken: bool = False
    pools: Iterator[int] = field(default_factory=count)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.recording_on:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def wait_for_device(self) -> None:
        assert self.make is not XpuRecorder, "torch 2.13 crashes if an XPU process does this after a replay"
        self.synchronize()

    def cuda_graph(self) -> Recording:
        return Recording(self)

    def xpu_graph(self) -> XpuRecording:
        return XpuRecording(self)


@dataclass
class Recording:
    cuda: Touchy
    pool: int = -1
    began_on: str = ""
    replays: int = 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.begin(pool)

    def begin(self, pool: int) -> None:
        assert self.cuda.current != "main", "the default stream cannot be recorded"
        assert not self.cuda.recording_on
        if self.cuda.alive.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: the pool's use count is 0")
        self.cuda.alive[pool] = self.cuda.alive.get(pool, 0) + 1
        self.pool, self.began_on = pool, self.cuda.current
        self.cuda.recording_on = self.cuda.current

    def capture_end(self) -> None:
        if self.cuda.current != self.began_on:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.cuda.recording_on = ""
        if self.cuda.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1

    def __del__(self) -> None:
        if self.pool >= 0:
            self.cuda.alive[self.pool] -= 1


class XpuRecording(Recording):
    """torch.xpu.XPUGraph has no error mode."""

    def capture_begin(self, pool: int) -> None:  # type: ignore[override]
        self.begin(pool)


@pytest.fixture(params=[(CudaRecorder, torch.cuda), (XpuRecorder, torch.xpu)], ids=["cuda", "xpu"])
def touchy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Touchy:
    make, torch_module = request.param
    module = Touchy(make)
    stand_ins: dict[str, Any] = {
        "stream": module.stream,
        "synchronize": module.wait_for_device,
        "CUDAGraph": module.cuda_graph,
        "XPUGraph": module.xpu_graph,
        "graph_pool_handle": lambda: next(module.pools),
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda _: None, synchronize=module.synchronize),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch_module, name, stand_in, raising=hasattr(torch_module, name))
    monkeypatch.setattr(recorder, "capture_stream", lambda module, device: "side")
    return module


def test_captures_share_a_memory_pool(touchy: Touchy) -> None:
    recorder = touchy.make()
    replays = []
    for _ in range(3):
        with recorder.session():
            recorder.begin()
            replays.append(recorder.end())
    assert touchy.alive == {0: 3}
    replays[1](NO_ROWS)


@pytest.mark.parametrize("pieces", [0, 1, 2], ids="recorded before it breaks off: {}".format)
@pytest.mark.parametrize("between", [False, True], ids=["while recording", "between recordings"])
def test_later_sessions_work_after_a_failed_session(touchy: Touchy, pieces: int, between: bool) -> None:
    recorder = touchy.make()
    references = []

    def break_off() -> None:
        with recorder.session():
            for _ in range(pieces):
                recorder.begin()
                references.append(recorder.end())
            if not between:
                recorder.begin()
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        break_off()
    assert not touchy.recording_on
    references.clear()
    with recorder.session():
        recorder.begin()
        recorder.end()(NO_ROWS)


def test_first_error_is_raised_on_a_broken_device(touchy: Touchy) -> None:
    recorder = touchy.make()

    def break_off() -> None:
        with recorder.session():
            recorder.begin()
            touchy.broken = True
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()


def test_tape_ends_if_a_compiled_segment_fails() -> None:
    tape, before = Tape(), _get_current_dispatch_mode_stack()

    def piece(_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def break_off() -> None:
        with tape.session():
            tape.begin()
            tape.call(piece, torch.zeros(1))

    with pytest.raises(torch.OutOfMemoryError):
        break_off()
    assert _get_current_dispatch_mode_stack() == before


def test_a_weak_view_shares_the_memory_and_does_not_keep_it() -> None:
    tensor = torch.arange(12.0).view(3, 4)[1:, 1:]
    weak = GraphRecorder.weak(None, tensor)  # type: ignore[arg-type]
    assert torch.equal(weak, tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert weak.untyped_storage()._cdata != tensor.untyped_storage()._cdata
