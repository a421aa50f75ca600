"""The CPU as a torch device."""

from __future__ import annotations

import torch

from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget
from ...kernels.ops import Ops
from ..pytorch.device import Device
from ..pytorch.runner import TorchRunner, open_runner
from .machine import cores, cpu_flags

OPS = Ops()
DEVICE = Device("cpu", torch.cpu, OPS, dtype=torch.float32)


def open_on_cpu(files: ModelFiles, budget: Budget, free: int) -> TorchRunner:
    """Load a model; torch's thread count is the whole process's."""
    torch.set_num_threads(budget.threads or cores())
    return open_runner(files, budget, device_for(files, cpu_flags()), free)


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """bfloat16 where the processor multiplies it in hardware, else float32, which is exact for any stored dtype and
    faster: without such instructions torch widens every bfloat16 product first."""
    return DEVICE
