"""No test decides by a clock: a busy machine would fail it. Work is counted (work.py), or has an order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = frozenset({"monotonic", "perf_counter", "process_time", "thread_time", "time"})
# waiting.py ends hangs; the fake worker reports the age of a step, as a real worker does; recording.py writes dates.
ALLOWED = frozenset({"waiting.py", "app/daemon/fake_worker.py", "recording.py"})
NAMES = re.compile(r"monotonic|perf_counter|_time\b|time_ns|\btime\.time|import time|loop\.time|datetime|\bdate\b")


def clocks(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each clock that a Python text reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name.removesuffix("_ns") in CLOCKS:
                yield node.lineno, name
            case ast.ImportFrom(module="time", names=names):
                yield from ((node.lineno, alias.name) for alias in names if alias.name.removesuffix("_ns") in CLOCKS)
            case ast.Call(func=ast.Attribute(attr="time", value=ast.Name(id="loop"))):
                yield node.lineno, "loop.time"
            case ast.Call(func=ast.Attribute(attr="now" | "utcnow" | "today", value=ast.Name(id="datetime" | "date"))):
                yield node.lineno, "datetime.now"


def test_no_test_reads_a_clock() -> None:
    readers = []
    for file in sorted(TESTS.rglob("*.py")):
        name = file.relative_to(TESTS).as_posix()
        source = file.read_text("utf-8")
        if name not in ALLOWED and NAMES.search(source):
            readers += [f"{name}:{line}: {clock}" for line, clock in clocks(source)]
    assert not readers, "count the work (work.py) or wait for an event (waiting.py)"


@pytest.mark.parametrize(
    ("source", "clock"),
    [
        ("import time\nassert time.monotonic() < 5", "monotonic"),
        ("from time import perf_counter", "perf_counter"),
        ("start = time.process_time_ns()", "process_time_ns"),
        ("began = time.time()", "time"),
        ("began = loop.time()", "loop.time"),
        ("datetime.now()", "datetime.now"),
    ],
)
def test_clocks_are_found(source: str, clock: str) -> None:
    assert [name for _, name in clocks(source)] == [clock]


@pytest.mark.parametrize("source", ["import time\ntime.sleep(1)", "patch.setattr(module.time, 'perf_counter', fake)"])
def test_other_names_are_none(source: str) -> None:
    assert list(clocks(source)) == []
