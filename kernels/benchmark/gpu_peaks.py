"""Measures the peak rates of a GPU. They bound the speed of kernels and steps."""

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
    """Peak rates of a GPU, per second."""

    read: float  # bytes
    copy: float  # bytes read plus bytes written
    multiply: float  # bfloat16 operations; a multiply-add counts as two
    rounds: int = ROUNDS  # number of runs; each rate is the median of its runs

    def changes(self, before: Peaks) -> dict[str, float]:
        """The relative change of each rate since `before`."""
        return {
            "read": self.read / before.read - 1,
            "copy": self.copy / before.copy - 1,
            "multiply": self.multiply / before.multiply - 1,
        }


def peaks(size: int = BUFFER) -> Peaks:
    """Measure the peak rates of the current GPU on random numbers. Allocates `size` bytes and frees them."""
    try:
        return Peaks(_read(size), _copy(size), _multiply())
    finally:
        torch.cuda.empty_cache()


def read_bandwidth(size: int = BUFFER) -> float:
    """Measure the read bandwidth of the current GPU in bytes per second: the fastest of the kernel shapes in SHAPES."""
    try:
        return _read(size)
    finally:
        torch.cuda.empty_cache()


def _read(size: int) -> float:
    buffer = torch.randn(size // 4, device="cuda")
    return size / min(seconds(Reader(buffer, shape).read) for shape in SHAPES)


def _copy(size: int) -> float:
    source = torch.randn(size // 8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def _multiply() -> float:
    matrices = torch.randn(2, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    return 2 * SIDE**3 / seconds(lambda: torch.mm(matrices[0], matrices[1]))


def seconds(call: Callable[[], object]) -> float:
    """The median of ROUNDS runs, timed by events on the device."""
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
