"""The CPU as a torch device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import Runner
from ...kernels.library import LibraryMissing
from ...kernels.ops import Ops
from ..pytorch.device import Device
from ..pytorch.opening import open_runner
from .machine import BF16_FLAGS, BF16_VARIANTS, cores, cpu_flags, variant

try:
    from .ops import OPS

    MISSING = ""
except LibraryMissing as error:  # the references are slower
    OPS = Ops()
    MISSING = str(error)

# Activations are float32: it represents every stored dtype exactly, and transformers uses it on CPUs. Without bfloat16
# instructions it is as fast as bfloat16, because the weights keep their stored dtype.
# A step of an hour hangs: even slow CPUs compute a prefill chunk of an 8B model faster.
DEVICE = Device("cpu", "cpu", torch.cpu, OPS, dtype=torch.float32, step_seconds=3600.0)


def open_on_cpu(files: ModelFiles, options: LoadOptions, free: int) -> Runner:
    """Load a model. Sets the number of threads of the whole process."""
    threads = _use_threads(options.threads)
    torch.set_num_threads(threads)
    runner = open_runner(files, options, device_for(files, cpu_flags()), free)
    if not (MISSING or options.reference_ops):
        torch.set_num_threads(1)  # torch computes little beside the kernels, and two thread pools compete for cores
    return runner


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """The CPU with the fastest activation dtype for these files."""
    # bfloat16 matrix instructions make prefill and decode of every model size faster, with and without our kernels.
    multiplies = bool(flags & BF16_FLAGS) if MISSING else variant(flags) in BF16_VARIANTS
    return replace(DEVICE, dtype=torch.bfloat16) if multiplies and files.config.dtype == "bfloat16" else DEVICE


def _use_threads(count: int | None) -> int:
    """Set and return the number of threads of the kernels. None: from the environment, else one per core."""
    if MISSING:
        return count or cores()
    threads: int = torch.ops.localllm.use_threads(count or 0)
    return threads
