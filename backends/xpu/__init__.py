"""The backend of Intel GPUs, with torch's XPU build. `probe` reads files and imports no torch.

No Intel GPU has run it. docs/hardware.md says what was tested, and how.
"""

from __future__ import annotations

import platform

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..machine import memory as main_memory
from ..pytorch.gpu.installation import Unusable
from ..pytorch.models import accepts as accepted_by_torch
from ..pytorch.models import code as code
from .installation import triton_problem, visible

name = "xpu"


def probe() -> DeviceInfo | Unavailable:
    try:
        gpus = visible()
    except Unusable as error:
        return Unavailable(name, str(error))
    gpu = gpus[0]
    features = {
        "GPUs": f"{len(gpus)}, the first is used",
        "driver": f"{gpu.driver} of Linux {platform.release()}",
        "Triton": f"no, torch instead: {triton_problem()}" if triton_problem() else "yes",
        "tested": "never on an Intel GPU: run `localllm selftest --backend xpu` first",
    }
    if gpu.is_integrated:
        return DeviceInfo(name, gpu.title, *main_memory(), features, main_memory=True)
    if not gpu.memory:
        features["resizable BAR"] = "off, which makes this GPU slow: turn it on in the firmware"
    return DeviceInfo(name, gpu.title, gpu.memory, gpu.memory, features)


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .device import open_on_xpu

    return open_on_xpu(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .device import plan_on_xpu

    return plan_on_xpu(files, options)


def read_bandwidth() -> float | None:
    import torch

    from ..pytorch.gpu.bandwidth import read_bandwidth, reduction

    return read_bandwidth(torch.xpu, reduction)
