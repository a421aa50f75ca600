"""The CPU: always here. Looking at it needs no torch; opening a model does."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..pytorch.models import accepts as accepted_by_torch
from .kernels import kernels
from .machine import cpu_flags, cpu_name, features, memory

name = "cpu"

# How long torch's threads spin before they sleep, where it computes instead of the kernels. OpenMP's own choice
# (300,000 turns) is ruinous as soon as another program wants a core: on 2 busy cores 8 tokens a second instead of 60.
# On 16 idle cores this costs 8 % of a tiny model's speed, while sleeping at once would cost 45 %.
SPIN = "5000"


def probe() -> DeviceInfo | Unavailable:
    if find_spec("torch") is None:
        return Unavailable(name, "torch is not installed")
    total, free = memory()
    flags = cpu_flags()
    return DeviceInfo(name, cpu_name(), total, free, features(flags) | kernels(flags), main_memory=True)


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read once, when torch is imported
    from .device import open_on_cpu

    return open_on_cpu(files, options, memory()[1])


def read_bandwidth() -> float:
    from .reading import read_bandwidth as measured

    return measured()
