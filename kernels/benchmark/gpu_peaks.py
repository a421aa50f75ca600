"""Measured peak rates of a GPU, the bounds of kernels and steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .read_kernel import SHAPES, Reader

BUFFER = 4 * 2**30  # bytes, much larger than the caches
SIDE = 8192  # rows and columns of the matrices that are multiplied
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates per second."""

    read: float  # bytes
    copy: float  # bytes read plus bytes written
    multiply: float  # bfloat16 operations; a multiply-add counts as two
    rounds: int = ROUNDS  # each rate is the median of this many runs

    def changes(self, before: Peaks) -> dict[str, float]:
        """The relative change of each rate since `before`."""
        pairs = {name: (getattr(self, name), getattr(before, name)) for name in ("read", "copy", "multiply")}
        return {name: now / then - 1 for name, (now, then) in pairs.items()}


def peaks(size: int = BUFFER) -> Peaks:
    """The peaks of the current GPU, measured on random numbers. Allocates `size` bytes and frees them."""
    try:
        return Peaks(_read(size), _copy(size), _multiply())
    finally:
        torch.cuda.empty_cache()


def read_bandwidth(size: int = BUFFER) -> float:
    """The read bandwidth of the current GPU in bytes per second: the best of a few kernel shapes."""
    try:
        return _read(size)
    finally:
        torch.cuda.empty_cache()


def _read(size: int) -> float:
    buffer = torch.randn(size // 4, device="cuda")
    return size / min(_seconds(Reader(buffer, shape).read) for shape in SHAPES)


def _copy(size: int) -> float:
    source = torch.randn(size // 8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _multiply() -> float:
    one, other = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * SIDE**3 / _seconds(lambda: torch.mm(one, other))


def _seconds(call: Callable[[], object]) -> float:
    """The median of ROUNDS runs, timed by events on the device."""
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
