"""A second queue of a torch device, for work that may run beside the main one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Protocol


class Streams(Protocol):
    """Work in `fork` may run beside what is queued after it, until `join`. In a capture both become part of it.

    A tensor that crosses between the streams must be kept alive until the join.
    """

    def fork(self) -> AbstractContextManager[None]:
        """Work within follows all that was queued before."""
        ...

    def join(self) -> None:
        """Work that is queued from now on follows that of the forks."""
        ...


class InOrder:
    """Of a device with a single queue."""

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


class SideStream:
    """Of devices whose torch module has streams: torch.cuda (HIP's as well), torch.xpu."""

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
