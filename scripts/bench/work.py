"""A benchmark case of an op, and its measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from cpu_peaks import beyond_caches

from localllm.kernels.ops import Ops
from localllm.kernels.ops.cases.reference_check import pack_value

MAX_SETS = 256  # most sets of arguments; calls cycle through the sets, so that no set stays in the caches
ROUNDS = 5  # measurements of the op and of its reference, alternately
MIN_SECONDS = 0.04  # shortest time of a measurement
MIN_RUNS = 2
PAUSE = 0.02  # seconds before a measurement: idle threads of the function measured before may spin until then
MIN_BOUND = 3e-6  # seconds; if the bound is shorter, the overhead of a call dominates


@dataclass(frozen=True, slots=True)
class Work:
    """A benchmark case of an op: its arguments, and the minimum numbers of bytes and operations.

    `make` returns a new set of arguments. `packs` names the weights that the device packs before the measurement.
    `reference` computes the same with plain torch from the unconverted arguments.
    """

    op: str  # "family.name", an op of Ops
    label: str
    make: Callable[[], Mapping[str, Any]]
    bytes: float
    reference: Callable[..., Any]
    operations: float = 0.0  # a multiply-add counts as two
    kinds: Sequence[str] = ("f32",)  # instructions for the op (cpu_peaks.KINDS); the fastest kind sets the bound
    packs: Sequence[str] = ()
    dtype: torch.dtype = torch.float32  # dtype of activations, an argument of packing


@dataclass(frozen=True, slots=True)
class Timed:
    op: str
    label: str
    seconds: float
    torch_seconds: float
    bound_seconds: float
    bound: str  # the peak rate that sets the bound: "read" or a kind of instruction

    @property
    def share(self) -> float | None:
        """The share of the peak rate: bound_seconds / seconds. None if the bound is below MIN_BOUND."""
        return self.bound_seconds / self.seconds if self.bound_seconds >= MIN_BOUND else None


def timed(work: Work, ops: Ops, peaks: Mapping[str, float], read: Callable[[], float]) -> Timed:
    """Measure the op and its reference alternately; return medians. `peaks`: operations per second of each kind.

    `read` measures bytes per second. It runs before each measurement, because a shared machine is not constant.
    """
    implementation = dict(ops)[work.op]
    sets = min(MAX_SETS, max(1, round(beyond_caches() / work.bytes)))
    plain = [work.make() for _ in range(sets)]
    packed = [
        {name: pack_value(ops, value, work.dtype) if name in work.packs else value for name, value in arguments.items()}
        for arguments in plain
    ]
    packed_sets = cycle(packed)
    plain_sets = cycle(plain)
    seconds: list[float] = []
    torch_seconds: list[float] = []
    reads: list[float] = []
    for _ in range(ROUNDS):
        reads.append(read())
        seconds += _round(implementation, packed_sets)
        torch_seconds += _round(work.reference, plain_sets)
    bound_seconds, bound = _bound(work, peaks, statistics.median(reads))
    return Timed(
        work.op, work.label, statistics.median(seconds), statistics.median(torch_seconds), bound_seconds, bound
    )


def _round(function: Callable[..., Any], arguments: Iterator[Mapping[str, Any]]) -> list[float]:
    """Seconds of each run, after a warm-up run."""
    time.sleep(PAUSE)
    _seconds(function, next(arguments))
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_SECONDS:
        times.append(_seconds(function, next(arguments)))
    return times


def _bound(work: Work, peaks: Mapping[str, float], read: float) -> tuple[float, str]:
    fastest = max(work.kinds, key=lambda kind: peaks[kind])
    read_seconds = work.bytes / read
    compute_seconds = work.operations / peaks[fastest]
    if read_seconds >= compute_seconds:
        return read_seconds, "read"
    return compute_seconds, fastest


def _seconds(function: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - start
