"""The backend of Huawei Ascend NPUs. This version finds the NPUs but has no runner for them yet."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...engine.runner import DeviceInfo, Unavailable

name = "npu"

DEVICES = Path("/dev")


def probe() -> DeviceInfo | Unavailable:
    """Checks the driver's device nodes, then whether torch_npu is installed."""
    if not (DEVICES / "davinci_manager").exists():
        return Unavailable(name, f"no Ascend driver ({DEVICES / 'davinci_manager'} not found)")
    count = len(list(DEVICES.glob("davinci[0-9]*")))
    if count == 0:
        return Unavailable(name, "the Ascend driver shows no NPU")
    if find_spec("torch_npu") is None:
        return Unavailable(name, f"{count} Ascend NPU present, but torch_npu is not installed")
    return Unavailable(name, f"{count} Ascend NPU present, but this version has no NPU runner yet")
