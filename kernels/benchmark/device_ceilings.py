"""What a GPU gives at most, for comparison with what kernels and steps take of it; measured, never looked up."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .reading import SHAPES, Reader

BUFFER = 4 * 2**30  # bytes; no cache holds a good part of it
SIDE = 8192  # of the square matrices that are multiplied
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per second."""

    read: float  # bytes
    copy: float  # bytes, both those read and those written
    multiply: float  # operations on bfloat16, two for a multiply-add
    rounds: int = ROUNDS  # whose median each is

    def changes(self, before: Peaks) -> dict[str, float]:
        """By how much each differs from what it was, as a share of that."""
        pairs = {name: (getattr(self, name), getattr(before, name)) for name in ("read", "copy", "multiply")}
        return {name: now / then - 1 for name, (now, then) in pairs.items()}


def peaks(size: int = BUFFER) -> Peaks:
    """Of the current GPU, on random numbers; takes `size` bytes of its memory and gives them back."""
    try:
        return Peaks(_read(size), _copy(size), _multiply())
    finally:
        torch.cuda.empty_cache()


def read_bandwidth(size: int = BUFFER) -> float:
    """Bytes per second that the current GPU reads, by the fastest of a few ways."""
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
    """The median of a few runs, each timed on the device."""
    call()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
