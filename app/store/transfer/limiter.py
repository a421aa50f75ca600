"""The bandwidth limit of all connections together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Limiter:
    """Delays callers so that they pass at most `rate` bytes per second; 0: no limit."""

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0  # time at which all bytes so far have passed

    def delay(self, count: int) -> float:
        """Pass `count` bytes. Returns the seconds that the caller must wait before its next read."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + count / self._rate
            return self._free_at - now
