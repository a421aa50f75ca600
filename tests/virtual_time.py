"""An event loop whose clock jumps to the next timer when no callback is ready.

Waits take no time and end in the order of their times, also on a busy machine. For tests without threads, sockets and
processes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock of the loop."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def now() -> float:
    """The virtual time in seconds."""
    running = asyncio.get_running_loop()
    assert isinstance(running, VirtualTimeLoop)
    return running.time()


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A decorator of an async test, which runs it in such a loop."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
