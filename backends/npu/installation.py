"""The reasons why this machine cannot use an NPU, and the start of torch_npu."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DEVICES = Path("/dev")
PACKAGES = ("torch", "torch_npu")
REAL = "Ascend"  # the names of all chips begin with it


def problem() -> str:
    """The first missing requirement and its remedy; empty if the machine has all. Imports no package."""
    return next(_problems(DEVICES), "")


def _problems(devices: Path) -> Iterator[str]:
    manager = devices / "davinci_manager"
    if not manager.exists():
        yield f"no Ascend driver ({manager} not found)"
    nodes = sorted(devices.glob("davinci[0-9]*"))
    if not nodes:
        yield "the Ascend driver shows no NPU"
    closed = [str(node) for node in (manager, *nodes[:1]) if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        yield f"no permission for {' and '.join(closed)}: add your user to the driver's group (HwHiAiUser)"
    count = f"{len(nodes)} Ascend NPU present, but"
    versions = {name: package_version(name) for name in PACKAGES}
    missing = [name for name, number in versions.items() if not number]
    if missing:
        yield f"{count} {' and '.join(missing)} not installed: install localllm[npu]"
    torch, torch_npu = versions.values()
    if torch.split(".")[:2] != torch_npu.split(".")[:2]:
        yield f"{count} torch {torch} and torch_npu {torch_npu} do not match: install the same minor version of both"


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def start() -> None:
    """Import torch_npu and select the first NPU. A second call does nothing.

    torch_npu.contrib.transfer_to_npu is never imported: it would replace functions of torch.cuda.
    """
    import torch_npu

    torch_npu.npu.set_device(0)
    torch_npu.npu.set_compile_mode(jit_compile=False)  # kernels for all shapes; no compilation for each shape
    torch_npu.npu.config.allow_internal_format = True  # weights in FRACTAL_NZ (formats.py)
