"""The backend of Huawei Ascend NPUs, over torch_npu. Only this package imports torch_npu, and only `open` does so.

No NPU has run it. docs/hardware.md says what was tested, and how.
"""

from __future__ import annotations

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..pytorch.models import accepts as accepted_by_torch
from ..pytorch.models import code as code
from .driver import DriverFailed, first
from .installation import REAL, package_version, problem, start

name = "npu"


def probe() -> DeviceInfo | Unavailable:
    missing = problem()
    if missing:
        return Unavailable(name, missing)
    try:
        npu = first()
    except DriverFailed as error:
        return Unavailable(name, str(error))
    if not npu.name.startswith(REAL):
        return Unavailable(name, f"{npu.name or 'a chip without a name'} is no Ascend NPU")
    features = {
        "NPUs": f"{npu.number}, the first is used",
        "CANN": npu.cann,
        "torch_npu": package_version("torch_npu"),
        "tested": "never on an NPU: run `localllm selftest --backend npu` first",
    }
    return DeviceInfo(name, npu.name, npu.memory, npu.free, features)


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    start()
    from .device import open_on_npu

    return open_on_npu(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    start()
    from .device import plan_on_npu

    return plan_on_npu(files, options)


def read_bandwidth() -> float | None:
    start()
    from .memory import read_bandwidth

    return read_bandwidth()
