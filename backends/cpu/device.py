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

# With such products bfloat16 gains where weights come from memory. Those that stay in the caches are quicker in
# float32: the bundled model, 15 million weights, 505 to 349 tokens a second on 16 cores with AMX.
SMALL = 128 * 2**20  # bytes as stored


def open_on_cpu(files: ModelFiles, budget: Budget, free: int) -> TorchRunner:
    """Load a model. The number of threads is the whole process's."""
    torch.set_num_threads(budget.threads or cores())
    return open_runner(files, budget, device_for(files, cpu_flags()), free)


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """The CPU as it best runs these files."""
    gains = files.config.dtype == "bfloat16" and files.weight_bytes >= SMALL and bool(flags & BF16_FLAGS)
    return replace(DEVICE, dtype=torch.bfloat16) if gains else DEVICE
