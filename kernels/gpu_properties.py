"""The properties of an NVIDIA GPU that Python code dispatches on. cuda/gpu.h has those of the CUDA C++ code."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .gpu_limits import gpu_limits


class GpuProperties(NamedTuple):
    capability: tuple[int, int]
    processors: int  # number of multiprocessors


@cache
def gpu_properties(device: torch.device) -> GpuProperties:
    """The properties of a CUDA device, limited by gpu_limits. Raises LimitRefused."""
    limits = gpu_limits()
    real = torch.cuda.get_device_properties(device)
    return GpuProperties(
        limits.limit_capability((real.major, real.minor)), limits.limit_processors(real.multi_processor_count)
    )
