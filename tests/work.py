"""Counts work, where a test would otherwise measure time: the count is the same on a slow or busy machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def calls(function: Callable[[], object]) -> Counter[str]:
    """Name -> number of calls, of Python and of C, of the functions that `function` calls in this thread."""
    counts: Counter[object] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1
        elif event == "c_call":
            counts[argument.__name__] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    named: Counter[str] = Counter()
    for key, number in counts.items():
        named[key.co_name if isinstance(key, CodeType) else str(key)] += number
    return named


def steps(function: Callable[[], object]) -> int:
    """The number of calls and returns of functions of Python and C in this thread: quicker than `calls`."""
    count = 0

    def add(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(add)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def lines(function: Callable[[], object]) -> int:
    """The number of lines of Python that `function` executes in this thread."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        executed += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return executed
