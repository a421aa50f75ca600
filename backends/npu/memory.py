"""The memory of the NPU: its size, and the speed of its reads."""

from __future__ import annotations

import statistics

import torch
import torch_npu

from ..pytorch.device import Meter

# Bytes that CANN takes in the first steps: kernels, and workspaces of each stream. Not measured.
LIBRARIES = 512 * 2**20
GRAPH = 512 * 2**10  # bytes of a graph of a few kernels; not measured
SIZE = 2**30  # bytes of the buffer whose read is timed: much larger than the caches
ROUNDS = 9


def free_memory() -> int:
    """Bytes of device memory that this process can still allocate."""
    free, _ = torch_npu.npu.mem_get_info()
    return int(free)


def total_memory() -> int:
    """Bytes of device memory."""
    _, total = torch_npu.npu.mem_get_info()
    return int(total)


def _release() -> None:
    torch_npu.npu.synchronize()
    torch_npu.npu.empty_cache()


METER = Meter(free_memory, _release, LIBRARIES, GRAPH)


def read_bandwidth() -> float | None:
    """Bytes per second of the largest reduction of a buffer, or None if the memory for it is not free."""
    if free_memory() < 2 * SIZE:
        return None
    buffer = torch.ones(SIZE // 4, device="npu")
    times = []
    for _ in range(ROUNDS + 1):
        start, end = (torch_npu.npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        buffer.amax()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    del buffer
    _release()
    return SIZE / float(statistics.median(times[1:]))  # the first round loads the kernel
