"""Waits of tests for other threads and processes. Only this file reads a clock, and only to end a hang."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds after which a wait has hung, on the busiest machine. pytest ends a test that takes longer (pyproject.toml).
HANG_SECONDS = 120.0


def wait_until(condition: Callable[[], object], *, pause: float = 0.01, says: Callable[[], object] = str) -> None:
    """Wait until a condition is true. Fails after HANG_SECONDS with the text of `says`."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true: {says()}"
        time.sleep(pause)
