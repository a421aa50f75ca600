"""A piece of work for an op, and how its time is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from ..ops import Ops
from .ceilings import beyond_caches

MOST_SETS = 256  # of arguments, which take turns so that none is found in the caches
TURNS = 4  # of each side
SECONDS = 0.04  # of a turn
LEAST_RUNS = 2
PAUSE = 0.02  # seconds: each side's threads spin for work a while longer, in the way of the other's
WORTH_SAYING = 3e-6  # seconds: a floor below this is less than a call costs


@dataclass(frozen=True, slots=True)
class Work:
    """What an op is given, and the least it must read and write and compute for it.

    `make` gives a new set of arguments; `packs` names those that the device's linear.pack converts beforehand.
    `peer`, torch, computes the same from the unconverted ones, as a program without these kernels would.
    """

    op: str  # "family.name", a field of Ops
    label: str
    make: Callable[[], Mapping[str, Any]]
    bytes: float
    peer: Callable[..., Any]
    operations: float = 0.0  # two for a multiply-add
    kinds: Sequence[str] = ("f32",)  # which ceilings of operations apply: the highest counts
    packs: Sequence[str] = ()
    dtype: torch.dtype = torch.float32  # of activations, for pack


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
        """Of the ceiling; None where the floor is too low to mean anything."""
        return self.floor / self.seconds if self.floor >= WORTH_SAYING else None


def timed(work: Work, ops: Ops, peaks: Mapping[str, float], read: Callable[[], float]) -> Timed:
    """Medians of both sides, which take turns. `peaks` are operations a second by the name of their ceiling; `read`
    measures bytes a second, before each of our turns: on a shared machine they change from minute to minute."""
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
    """Seconds of each run, after one that does not count."""
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
