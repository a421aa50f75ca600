"""The second stream of a device: the order of work on both streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from localllm.backends.cpu.device import DEVICE as CPU
from localllm.backends.pytorch.streams import SideStream
from localllm.kernels.ops.streams import InOrder


class Queues:
    """A torch module that records queued work and waits."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, ...]] = []
        self.current = self.main = _Queue(self, "main")

    def Stream(self, device: int) -> _Queue:
        assert device == self.current_device()
        return _Queue(self, "side")

    def current_device(self) -> int:
        return 3

    def current_stream(self) -> _Queue:
        return self.current

    @contextmanager
    def stream(self, queue: _Queue) -> Iterator[None]:
        self.current = queue
        yield
        self.current = self.main

    def work(self, name: str) -> None:
        self.notes.append((self.current.name, name))


class _Queue:
    def __init__(self, queues: Queues, name: str) -> None:
        self.queues, self.name = queues, name

    def wait_stream(self, other: _Queue) -> None:
        self.queues.notes.append((self.name, "waits for", other.name))


def test_fork_waits_for_earlier_work_and_join_for_the_fork() -> None:
    queues = Queues()
    streams = SideStream(cast(Any, queues))
    queues.work("before")
    with streams.fork():
        queues.work("beside")
    queues.work("meanwhile")
    streams.join()
    queues.work("after")
    assert queues.notes == [
        ("main", "before"),
        ("side", "waits for", "main"),
        ("side", "beside"),
        ("main", "meanwhile"),
        ("main", "waits for", "side"),
        ("main", "after"),
    ]


def test_all_streams_of_a_device_have_the_same_second_queue() -> None:
    """Libraries and kernels allocate memory for every queue."""
    queues = Queues()
    assert SideStream(cast(Any, queues))._side is SideStream(cast(Any, queues))._side


def test_device_with_one_queue_runs_in_order() -> None:
    streams = CPU.streams()
    assert isinstance(streams, InOrder)
    x = torch.ones(3)
    with streams.fork():
        x *= 2
    streams.join()
    assert x.sum() == 6.0


@pytest.mark.real
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_forked_work_is_part_of_a_capture() -> None:
    streams = SideStream(cast(Any, torch.cuda))
    x = torch.zeros(1 << 22, device="cuda")
    side, main = torch.empty_like(x), torch.empty_like(x)

    def work() -> None:
        x.add_(1)
        with streams.fork():
            torch.mul(x, 2, out=side)
        torch.mul(x, 3, out=main)
        streams.join()
        x.copy_(side + main)

    work()
    torch.cuda.synchronize()
    assert (x == 5).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    assert (x == 30).all()
