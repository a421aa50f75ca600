"""The free memory of the GPU, with the limit of gpu_limits."""

from __future__ import annotations

import torch

from ...engine.errors import SettingRefused
from ...kernels.gpu.limits import PREFIX, gpu_limits
from ..pytorch.device import Meter

# Bytes that the driver and libraries take in the first steps: code of kernels, and workspaces of cuBLAS on each stream.
LIBRARIES = 288 * 2**20
GRAPH = 192 * 2**10  # bytes that the driver takes for a graph of a few kernels


def free_memory() -> int:
    """Bytes of GPU memory that this process can still allocate."""
    torch.cuda.init()
    free, _ = gpu_limits().limit_memory(*torch.cuda.mem_get_info())
    return free


def limit_allocator() -> None:
    """Make torch run out of memory at the limit of gpu_limits, if there is one. Raises SettingRefused if other programs
    use more memory of the GPU than the limit: an imitated GPU of this size would have no memory."""
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    limits = gpu_limits()
    if limits.memory is not None:
        others = total - free - torch.cuda.memory_reserved()
        if others >= limits.memory:
            sizes = f"{limits.memory >> 20} MiB, but other programs use {others >> 20} MiB"
            raise SettingRefused(
                f"{PREFIX}MEMORY limits the GPU to {sizes}", "end the other programs, or set a larger limit"
            )
        limited, _ = limits.limit_memory(free, total)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + limited) / total)


def _release() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


METER = Meter(free_memory, _release, LIBRARIES, GRAPH)
