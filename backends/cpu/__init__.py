"""The CPU backend. Only `open` imports torch."""

from __future__ import annotations

from importlib.util import find_spec

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..machine import cpu_flags, cpu_name, features, limit_spinning, memory
from ..pytorch.models import accepts as accepted_by_torch
from ..pytorch.models import code as code
from .kernels import kernels

name = "cpu"


def probe() -> DeviceInfo | Unavailable:
    if find_spec("torch") is None:
        return Unavailable(name, "torch is not installed")
    total, free = memory()
    flags = cpu_flags()
    return DeviceInfo(name, cpu_name(), total, free, features(flags) | kernels(flags), main_memory=True)


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    limit_spinning()  # torch computes ops without a C++ kernel with OpenMP
    from .device import open_on_cpu

    return open_on_cpu(files, options, memory()[1])


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from ..pytorch.opening import plan_memory as plan_on_torch
    from .device import device_for

    return plan_on_torch(files, options, device_for(files, cpu_flags()), memory()[1])


def read_bandwidth() -> float:
    from . import bandwidth

    return bandwidth.read_bandwidth()
