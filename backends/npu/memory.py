"""The memory of the NPU: its size, and the speed of its reads."""

from __future__ import annotations

import torch_npu

from ..pytorch.gpu import bandwidth
from ..pytorch.gpu.memory import GpuMemory

# Bytes that CANN takes in the first steps: kernels, and workspaces of each stream. Not measured.
LIBRARIES = 512 * 2**20
GRAPH = 512 * 2**10  # bytes of a graph of a few kernels; not measured
MEMORY = GpuMemory(torch_npu.npu)
METER = MEMORY.meter(LIBRARIES, GRAPH)


def read_bandwidth() -> float | None:
    """Bytes per second of the largest reduction of a buffer, or None if the memory for it is not free."""
    return bandwidth.read_bandwidth(torch_npu.npu, bandwidth.reduction)
