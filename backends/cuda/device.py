"""An NVIDIA GPU as a torch device."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...engine.errors import ModelRefused
from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget, Runner
from ..pytorch.device import Device
from ..pytorch.graphs.cuda import CudaRecorder
from ..pytorch.runner import open_runner
from .ops import OPS

DEVICE = Device(
    "cuda",
    torch.cuda,
    OPS,
    dtype=torch.bfloat16,
    overlap=True,
    pinned=True,
    cache_share=0.85,
    step_tokens=2048,
    row_tokens=None,
    fp8_cache=True,
    recorder=CudaRecorder,
    graphs="breakable",
    step_seconds=120.0,  # the longest take a second, but for kernels that are compiled at their first use
)

# For what steps make on the way, the libraries' workspaces and captured graphs.
WORKSPACE = 2**30  # bytes


def open_on_cuda(files: ModelFiles, budget: Budget) -> Runner:
    """Load a model. Raises ModelRefused or SettingRefused, also where the GPU has too little memory."""
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    # float32 is stored so where it matters to somebody: those models are small or experiments.
    dtype = torch.float32 if files.config.dtype == "float32" else torch.bfloat16
    try:
        return open_runner(files, budget, replace(DEVICE, dtype=dtype), max(0, free - WORKSPACE))
    except torch.OutOfMemoryError as error:
        raise ModelRefused(
            f"{files.name} does not fit into the GPU's memory: {error}",
            "close other programs, allow a smaller cache, or choose a smaller model",
        ) from error
