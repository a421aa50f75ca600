"""Streams of a device, for work that may run in parallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Streams(Protocol):
    """The main stream of a device and a second stream. A capture includes the work of both streams.

    A tensor that is written on one stream and read on the other must stay referenced until `join`.
    """

    @property
    def after_router(self) -> bool:
        """Whether a mixture of experts forks after its router, not before it."""
        ...

    def fork(self) -> AbstractContextManager[None]:
        """A context whose work goes to the second stream. It begins after all work before the fork."""
        ...

    def join(self) -> None:
        """Make all later work of the main stream wait for the forked work."""
        ...


class InOrder:
    """A single stream: forked work runs in the order of the calls."""

    after_router = False

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        pass


IN_ORDER = InOrder()
