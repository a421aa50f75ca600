"""The backend of AMD GPUs, with torch's ROCm build. `probe` reads files and imports no torch.

No AMD GPU has run it. docs/hardware.md says what was tested, and how.
"""

from __future__ import annotations

import platform

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..pytorch.gpu.installation import Unusable
from ..pytorch.models import accepts as accepted_by_torch
from ..pytorch.models import code as code
from .gpus import DRIVER
from .installation import rocm, triton_problem, visible

name = "hip"


def probe() -> DeviceInfo | Unavailable:
    try:
        gpus = visible()
    except Unusable as error:
        return Unavailable(name, str(error))
    gpu = gpus[0]
    features = {
        "target": gpu.target,
        "GPUs": f"{len(gpus)}, the first is used",
        "driver": f"{DRIVER} of Linux {platform.release()}",
        "ROCm": rocm(),
        "Triton": f"no, references instead: {triton_problem()}" if triton_problem() else "yes",
        "tested": "never on an AMD GPU: run `localllm selftest --backend hip` first",
    }
    if gpu.is_integrated:
        features["memory"] = f"shared with all programs; {gpu.carved_out >> 20} MiB are for the GPU alone"
    return DeviceInfo(name, gpu.title, gpu.memory, gpu.free, features, main_memory=gpu.is_integrated)


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .device import open_on_hip

    return open_on_hip(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .device import plan_on_hip

    return plan_on_hip(files, options)


def read_bandwidth() -> float | None:
    from .memory import read_bandwidth

    return read_bandwidth()
