"""The memory of an AMD GPU. torch calls HIP devices "cuda"."""

from __future__ import annotations

import torch

from ..machine import memory as main_memory
from ..pytorch.gpu import bandwidth
from ..pytorch.gpu.memory import GpuMemory
from .installation import triton_problem

LIBRARIES = 512 * 2**20  # bytes of kernels, and of workspaces of hipBLASLt, in the first steps; not measured
GRAPH = 192 * 2**10  # bytes of a graph of a few kernels; measured on NVIDIA GPUs


class SharedMemory(GpuMemory):
    """Main memory that an integrated GPU shares with all programs: ROCm may count more than is free."""

    def free(self) -> int:
        return min(super().free(), main_memory()[1])


MEMORY = GpuMemory(torch.cuda)
SHARED = SharedMemory(torch.cuda)


def read_bandwidth() -> float | None:
    readers = bandwidth.reduction if triton_problem() else bandwidth.triton_readers
    return bandwidth.read_bandwidth(torch.cuda, readers)
