"""A second queue of a torch device, for work that may run in parallel with the main queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Protocol


class Streams(Protocol):
    """A second queue. A capture includes the work of both queues.

    A tensor that is written on one queue and read on the other must stay referenced until `join`.
    """

    def fork(self) -> AbstractContextManager[None]:
        """A context whose work goes to the second queue. It begins after all work that was queued before the fork."""
        ...

    def join(self) -> None:
        """Make all later work of the main queue wait for the forked work."""
        ...


class InOrder:
    """Streams of a device with a single queue: forked work runs in the order of the calls."""

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


class SideStream:
    """Streams of a device whose torch module has streams: torch.cuda (also for HIP), torch.xpu.

    A stream that has run once makes all later graphs of the process slower: on an H200, each kernel of a graph then
    starts 0.5 us later (3 % of a decode step). So a stream must gain more than that, and nothing else may create one.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._side = module.Stream()

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._side.wait_stream(self._module.current_stream())
        with self._module.stream(self._side):
            yield

    def join(self) -> None:
        self._module.current_stream().wait_stream(self._side)
