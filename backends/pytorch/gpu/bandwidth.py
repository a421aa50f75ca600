"""Measures the read bandwidth of the device memory, which bounds the speed of decode."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import Tensor

from ..failures import is_shortage

SIZE = 2**30  # bytes: much larger than the caches, and small enough to fit in memory with a loaded model
ROUNDS = 9

# A float32 buffer of 2^17 * n values -> functions that read it once. The fastest one is measured.
Readers = Callable[[Tensor], Iterable[Callable[[], object]]]


def read_bandwidth(module: ModuleType, readers: Readers, size: int = SIZE) -> float | None:
    """Bytes per second of the fastest reader, or None if `size` bytes of device memory are not free.

    `module`: the torch module of the device, e.g. torch.cuda.
    """
    try:
        buffer = torch.randn(size // 4, device=torch.device(module.__name__.rpartition(".")[2]))
        return size / min(seconds(module, reader) for reader in readers(buffer))
    except RuntimeError as error:
        if is_shortage(error):
            return None
        raise
    finally:
        module.empty_cache()


def seconds(module: ModuleType, call: Callable[[], object]) -> float:
    """The median of ROUNDS runs, timed by events on the device. The first run, which is not timed, loads the kernel."""
    call()
    times: list[float] = []
    for _ in range(ROUNDS):
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def triton_readers(buffer: Tensor) -> list[Callable[[], object]]:
    """A Triton kernel in all its shapes."""
    from .read_kernel import SHAPES, Reader

    return [Reader(buffer, shape).read for shape in SHAPES]


def reduction(buffer: Tensor) -> list[Callable[[], object]]:
    """torch's reduction, for devices without Triton."""
    return [buffer.amax]
