"""The memory of an Intel GPU."""

from __future__ import annotations

import torch

from ...kernels.gpu.limits import gpu_limits
from ..machine import memory as main_memory
from ..pytorch.gpu.memory import GpuMemory

# Bytes, and share of the memory, that a load leaves to oneDNN: products allocate scratch memory outside of torch's
# allocator if the number of rows is not a multiple of a tile. SGLang reserves as much.
SCRATCH = 2 * 2**30
SCRATCH_SHARE = 1 / 8
LIBRARIES = 256 * 2**20  # bytes of kernels and of the driver in the first steps; not measured
GRAPH = 512 * 2**10  # bytes of a graph of a few kernels; not measured


class XpuMemory(GpuMemory):
    """See GpuMemory."""

    def free(self) -> int:
        """Bytes that this process can still allocate, without the scratch memory of oneDNN."""
        total = torch.xpu.get_device_properties().total_memory
        try:
            free, _ = torch.xpu.mem_get_info()
        except RuntimeError:  # integrated graphics have no such count
            _, free = main_memory()
        free = min(free, total - torch.xpu.memory_reserved())  # the driver counts some allocations late
        free, total = gpu_limits().limit_memory(free, total)
        return max(0, free - min(SCRATCH, int(total * SCRATCH_SHARE)))

    def release(self) -> None:
        torch.xpu.current_stream().synchronize()  # not the device: see XpuRecorder
        torch.xpu.empty_cache()


MEMORY = XpuMemory(torch.xpu)
METER = MEMORY.meter(LIBRARIES, GRAPH)


def driver_version() -> str:
    return str(torch.xpu.get_device_properties().driver_version)
