"""The rate of a running answer."""

from __future__ import annotations

from collections.abc import Callable

SECONDS = 0.25  # seconds between updates of the rate


class Rate:
    """Tokens per second of an answer, from its first addition on. One addition is about one token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.value = 0.0
        self.additions = 0
        self._clock = clock
        self._start = 0.0
        self._updated = 0.0

    def add(self) -> bool:
        """Count an addition. Returns True if `value` has changed."""
        now = self._clock()
        self.additions += 1
        if self.additions == 1:
            self._start = now
            self._updated = now
            return False
        if now - self._updated <= SECONDS:
            return False
        self._updated = now
        self.value = (self.additions - 1) / (now - self._start)
        return True
