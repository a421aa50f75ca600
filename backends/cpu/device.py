"""The CPU as a torch device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget
from ...kernels.ops import Ops
from ..pytorch.device import Device
from ..pytorch.runner import TorchRunner, open_runner
from .machine import BF16_FLAGS, cores, cpu_flags

OPS = Ops()

# float32 holds every stored dtype exactly and is what transformers computes on a CPU. Without bfloat16 products in
# hardware it is also faster: measured 5.8 times at a prompt and 2.2 times at 16 rows, with AVX2 alone.
DEVICE = Device("cpu", torch.cpu, OPS, dtype=torch.float32)


def open_on_cpu(files: ModelFiles, budget: Budget, free: int) -> TorchRunner:
    """Load a model. The number of threads is the whole process's."""
    torch.set_num_threads(budget.threads or cores())
    return open_runner(files, budget, device_for(files, cpu_flags()), free)


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """The CPU as it best runs these files: in bfloat16 where they are stored so and the processor multiplies it."""
    fits = bool(flags & BF16_FLAGS) and files.config.dtype == "bfloat16"
    return replace(DEVICE, dtype=torch.bfloat16) if fits else DEVICE
