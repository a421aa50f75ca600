"""The properties of an NVIDIA GPU that Python code dispatches on. cuda/device/gpu.h has those of the CUDA C++ code."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import torch

from .limits import gpu_limits

# Multiplications of bfloat16 numbers per clock and multiprocessor with dense tensor cores, by compute capability, from
# NVIDIA's descriptions of the architectures. GPUs of other capabilities have OTHER_MULTIPLICATIONS.
MULTIPLICATIONS: Mapping[tuple[int, int], int] = MappingProxyType(
    {(8, 0): 1024, (9, 0): 2048, (10, 0): 4096, (10, 3): 4096}
)
OTHER_MULTIPLICATIONS = 512


class GpuProperties(NamedTuple):
    capability: tuple[int, int]
    processors: int  # number of multiprocessors
    clock: float = 0.0  # maximum cycles per second

    @property
    def multiplications(self) -> float:
        """Maximum number of multiplications of bfloat16 numbers per second."""
        per_cycle = MULTIPLICATIONS.get(self.capability, OTHER_MULTIPLICATIONS)
        return per_cycle * self.processors * self.clock


@cache
def gpu_properties(device: torch.device) -> GpuProperties:
    """The properties of a CUDA device, limited by gpu_limits. Raises LimitRefused."""
    limits = gpu_limits()
    real = torch.cuda.get_device_properties(device)
    return GpuProperties(
        limits.limit_capability((real.major, real.minor)),
        limits.limit_processors(real.multi_processor_count),
        real.clock_rate * 1e3,
    )
