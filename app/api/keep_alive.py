"""Comments that keep the connection of a stream of server-sent events: proxies and clients close a silent connection.

A stream begins when its response head is sent. The head of an answer is sent when the worker has accepted the request:
until then, while the model loads or the worker renders the prompt, the client gets no byte, because an error still has
its own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMMENT = b": keep-alive\n\n"
SECONDS = 15.0  # maximum time between two writes of a stream


class Deadline:
    """The time of the next write to a stream. Create it on the event loop when the stream begins."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.restart()

    def restart(self) -> None:
        """Call it when data is written."""
        self._time = self._loop.time() + SECONDS

    @property
    def passed(self) -> bool:
        return self._loop.time() >= self._time

    @contextmanager
    def watch(self, wake: Callable[[], None]) -> Iterator[None]:
        """Until the end of the block, call `wake` when the time has passed. One timer serves all writes: a timer for
        each write would cost as much as the write."""
        timers: list[asyncio.TimerHandle] = []

        def check() -> None:
            if self.passed:
                wake()
            later = self._loop.time() + SECONDS if self.passed else self._time
            timers[:] = [self._loop.call_at(later, check)]

        check()
        try:
            yield
        finally:
            timers[0].cancel()

    def timeout(self) -> asyncio.Timeout:
        """A context manager that raises TimeoutError at this time."""
        return asyncio.timeout_at(self._time)
