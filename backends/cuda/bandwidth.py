"""Measures the read bandwidth of the GPU memory, which bounds the speed of decode."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from .read_kernel import SHAPES, Reader

SIZE = 2**30  # bytes: much larger than the caches, and small enough to fit in memory with a loaded model
ROUNDS = 9


def read_bandwidth(size: int = SIZE) -> float | None:
    """Bytes per second with the fastest shape of the kernel, or None if `size` bytes of GPU memory are not free."""
    try:
        return _read(size)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _read(size: int) -> float:
    buffer = torch.randn(size // 4, device="cuda")
    return size / min(seconds(Reader(buffer, shape).read) for shape in SHAPES)


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
