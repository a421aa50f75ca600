"""A benchmark case of an op, and its measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from ..ops import Ops
from .cpu_peaks import beyond_caches

MOST_SETS = 256  # limit of sets of arguments, which are cycled so that none stays in the caches
TURNS = 4  # measurements of each side, alternating
SECONDS = 0.04  # minimum seconds per measurement
LEAST_RUNS = 2
PAUSE = 0.02  # seconds before a measurement; until then idle threads of the other side may spin
WORTH_SAYING = 3e-6  # seconds; a lower floor is less than the overhead of a call


@dataclass(frozen=True, slots=True)
class Work:
    """A case of an op: its arguments, and the bytes and operations that it needs at least.

    `make` returns a new set of arguments. `packs` names those that linear.pack converts before the measurement. `peer`
    computes the same with plain torch from the unconverted arguments.
    """

    op: str  # "family.name", an op of Ops
    label: str
    make: Callable[[], Mapping[str, Any]]
    bytes: float
    peer: Callable[..., Any]
    operations: float = 0.0  # a multiply-add counts as two
    kinds: Sequence[str] = ("f32",)  # ceilings that apply; the highest sets the floor
    packs: Sequence[str] = ()
    dtype: torch.dtype = torch.float32  # dtype of activations, an argument of linear.pack


@dataclass(frozen=True, slots=True)
class Timed:
    op: str
    label: str
    seconds: float
    torch_seconds: float
    floor: float  # seconds
    bound: str  # the ceiling that sets the floor

    @property
    def share(self) -> float | None:
        """floor / seconds; None if the floor is below WORTH_SAYING."""
        return self.floor / self.seconds if self.floor >= WORTH_SAYING else None


def timed(work: Work, ops: Ops, peaks: Mapping[str, float], read: Callable[[], float]) -> Timed:
    """Measures the op and its peer alternately; returns medians. `peaks`: operations per second by name of the ceiling.
    `read` measures bytes per second; it is called before each measurement, because a shared machine is not constant."""
    implementation = dict(ops)[work.op]
    sets = min(MOST_SETS, max(1, round(beyond_caches() / work.bytes)))
    plain = [work.make() for _ in range(sets)]
    packed = [
        {name: ops.linear.pack(value, work.dtype) if name in work.packs else value for name, value in arguments.items()}
        for arguments in plain
    ]
    mine, other = cycle(packed), cycle(plain)
    ours: list[float] = []
    theirs: list[float] = []
    reads: list[float] = []
    for _ in range(TURNS):
        reads.append(read())
        ours += _turn(implementation, mine)
        theirs += _turn(work.peer, other)
    floor, bound = _floor(work, peaks, statistics.median(reads))
    return Timed(work.op, work.label, statistics.median(ours), statistics.median(theirs), floor, bound)


def _turn(function: Callable[..., Any], arguments: Iterator[Mapping[str, Any]]) -> list[float]:
    """Seconds of each run, after a warm-up run."""
    time.sleep(PAUSE)
    _seconds(function, next(arguments))
    times: list[float] = []
    while len(times) < LEAST_RUNS or sum(times) < SECONDS:
        times.append(_seconds(function, next(arguments)))
    return times


def _floor(work: Work, peaks: Mapping[str, float], read: float) -> tuple[float, str]:
    fastest = max(work.kinds, key=lambda kind: peaks[kind])
    reading, computing = work.bytes / read, work.operations / peaks[fastest]
    return (reading, "read") if reading >= computing else (computing, fastest)


def _seconds(function: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - start
