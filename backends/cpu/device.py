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
from .machine import BF16_FLAGS, BF16_LANES, cores, cpu_flags, lane

try:
    from .ops import OPS

    MISSING = ""
except LibraryMissing as error:  # right all the same, but slow
    OPS = Ops()
    MISSING = str(error)

# float32 holds every stored dtype exactly and is what transformers computes on a CPU. Without bfloat16 products in
# hardware it costs next to nothing, as weights stay as they are stored: with AVX2 the bundled model takes 96 ms instead
# of 99 for a prompt of 512, 1.66 instead of 1.61 for a token, 6.6 instead of 6.2 for one of each of 16 rows.
# No step takes an hour that anybody waits for: 512 tokens of an 8B model would then be computed at 2.3 GFLOP/s.
DEVICE = Device("cpu", "cpu", torch.cpu, OPS, dtype=torch.float32, step_seconds=3600.0)


def open_on_cpu(files: ModelFiles, options: LoadOptions, free: int) -> Runner:
    """Load a model. The number of threads is the whole process's."""
    threads = _use_threads(options.threads)
    torch.set_num_threads(threads)
    runner = open_runner(files, options, device_for(files, cpu_flags()), free)
    if not (MISSING or options.reference_ops):
        torch.set_num_threads(1)  # what steps leave to torch is too little to share, and two teams fight for the cores
    return runner


def device_for(files: ModelFiles, flags: frozenset[str]) -> Device:
    """The CPU as it best runs these files."""
    # Products of bfloat16 in hardware gain whatever the size: on a Zen 5 with two cores the bundled model takes 22 ms
    # instead of 40 for a prompt of 512, 0.71 instead of 0.79 for a token, 1.47 instead of 2.15 for one of each of 16
    # rows, and answers as many of its held-out questions; torch alone takes 4.0 ms instead of 5.7 for a token.
    multiplies = bool(flags & BF16_FLAGS) if MISSING else lane(flags) in BF16_LANES
    return replace(DEVICE, dtype=torch.bfloat16) if multiplies and files.config.dtype == "bfloat16" else DEVICE


def _use_threads(count: int | None) -> int:
    """Sets the size of the kernels' team; None: what the environment says, else all cores."""
    if MISSING:
        return count or cores()
    threads: int = torch.ops.localllm.use_threads(count or 0)
    return threads
