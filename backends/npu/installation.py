"""The reasons why this machine cannot use an NPU, and the start of torch_npu."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

from .. import BackendUnavailable

DEVICES = Path("/dev")
PACKAGES = ("torch", "torch_npu")
HINT = "install the release of CANN that torch_npu names for this version, and run its set_env.sh"
REAL = "Ascend"  # the names of all chips begin with it


def problem() -> str:
    """The first missing requirement and its remedy; empty if the machine has all. Imports no package."""
    return next(chain(_driver_problems(DEVICES), _package_problems(DEVICES)), "")


def _nodes(devices: Path) -> list[Path]:
    """The device files of the NPUs."""
    return sorted(devices.glob("davinci[0-9]*"))


def _driver_problems(devices: Path) -> Iterator[str]:
    manager = devices / "davinci_manager"
    if not manager.exists():
        yield f"no Ascend driver ({manager} not found)"
    nodes = _nodes(devices)
    if not nodes:
        yield "the Ascend driver shows no NPU"
    for group in ([manager], nodes):  # one NPU suffices: ASCEND_RT_VISIBLE_DEVICES selects it
        if group and not any(os.access(node, os.R_OK | os.W_OK) for node in group):
            yield f"no permission for {group[0]}: add your user to the driver's group (HwHiAiUser)"


def _package_problems(devices: Path) -> Iterator[str]:
    number_of_npus = len(_nodes(devices))
    count = f"{number_of_npus} Ascend {'NPU is' if number_of_npus == 1 else 'NPUs are'} present, but"
    versions = {name: package_version(name) for name in PACKAGES}
    missing = [name for name, number in versions.items() if not number]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        yield f"{count} {' and '.join(missing)} {verb} not installed: install localllm[npu]"
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
    """Import torch_npu and select the first NPU. A second call does nothing. Raises BackendUnavailable.

    torch_npu.contrib.transfer_to_npu is never imported: it would replace functions of torch.cuda.
    """
    try:
        import torch_npu

        torch_npu.npu.set_device(0)
    except (ImportError, RuntimeError) as error:
        reason = f"torch_npu {package_version('torch_npu')} does not start: {error}".partition("\n")[0]
        raise BackendUnavailable(f"backend npu is unavailable: {reason}", {"npu": reason}, HINT) from error
    torch_npu.npu.set_compile_mode(jit_compile=False)  # kernels for all shapes; no compilation for each shape
    torch_npu.npu.config.allow_internal_format = True  # weights in FRACTAL_NZ (formats.py)
