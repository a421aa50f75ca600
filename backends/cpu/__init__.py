"""The CPU: always here. Looking at it needs no torch; opening a model does."""

from __future__ import annotations

from importlib.util import find_spec

from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget, DeviceInfo, Runner, Unavailable
from .machine import cores, cpu_flags, cpu_name, features, memory

name = "cpu"


def probe() -> DeviceInfo | Unavailable:
    if find_spec("torch") is None:
        return Unavailable(name, "torch is not installed")
    total, free = memory()
    return DeviceInfo(name, cpu_name(), total, free, features(cpu_flags()) | {"cores": str(cores())}, main_memory=True)


def accepts(files: ModelFiles) -> str:
    from ..pytorch.runner import accepts as accepted_by_torch

    return accepted_by_torch(files)


def open(files: ModelFiles, budget: Budget) -> Runner:
    from .device import open_on_cpu

    return open_on_cpu(files, budget, memory()[1])
