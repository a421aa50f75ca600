"""The reasons why this machine cannot use an AMD GPU. Reads files only."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from ..llamacpp_install import without_torch
from ..machine import text
from ..pytorch.gpu import installation
from ..pytorch.gpu.installation import Unusable, package_folder, pci_gpus
from .gpus import AMD, DRIVER, KINDS, Gpu, Version, gpus

SYSFS = Path("/sys")
DEVICES = Path("/dev")
PROCESSORS = "0x1022"  # PCI vendor of AMD's processors, whose NPUs have it too
SELECT = "HIP_VISIBLE_DEVICES"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"  # the version that ROCm takes all GPUs for, such as 11.0.0
LIBRARIES = "lib/rocblas/library/TensileLibrary_lazy_*.dat"  # in torch: a file for each target of its products
# Targets of torch's ROCm wheels, for a torch that has rocBLAS in another package.
TARGETS = frozenset(
    "gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1150 gfx1151 gfx1200 gfx1201".split()
)


def visible(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that torch uses, its first one first. Raises Unusable."""
    present = gpus(SYSFS)
    if not present:
        raise Unusable(next(_without_gpu()))
    version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", environment.get(OVERRIDE, ""))
    if version:
        present = [replace(gpu, version=Version(*map(int, version.groups()))) for gpu in present]
    # HIP numbers the GPUs that ROCR selects. CUDA_VISIBLE_DEVICES counts if its own variable is not set.
    numbered = _selected(present, "ROCR_VISIBLE_DEVICES", environment)
    selected = _selected(numbered, SELECT if SELECT in environment else "CUDA_VISIBLE_DEVICES", environment)
    reason = next(_problems(selected, numbered), "")
    if reason:
        raise Unusable(reason)
    return selected


def triton_problem() -> str:
    """The reason why Triton cannot compile kernels for AMD GPUs; empty if it can."""
    return installation.triton_problem("amd", "no backend for AMD GPUs")


def rocm() -> str:
    """The version of ROCm that the installed torch was built with; empty: torch is missing, or has no ROCm."""
    folder = package_folder("torch")
    line = re.search(r"^hip\b[^=\n]*=\s*['\"]([^'\"]+)", text(folder / "version.py"), re.MULTILINE) if folder else None
    return line[1] if line else ""


def _served(folder: Path) -> frozenset[str]:
    """The targets that torch has kernels for. `folder`: of torch."""
    return frozenset(file.stem.rpartition("_")[2] for file in folder.glob(LIBRARIES)) or TARGETS


def _without_gpu() -> Iterator[str]:
    for gpu in pci_gpus(SYSFS, AMD, KINDS):
        present = f"AMD GPU {gpu.device:04x} is present, but"
        if gpu.driver != DRIVER:
            yield f"{present} its driver is {gpu.driver or 'missing'}, not {DRIVER}"
        yield f"{present} {DRIVER} of Linux {platform.release()} cannot compute on it: update Linux or {DRIVER}"
    if PROCESSORS in (text(file) for file in SYSFS.glob("class/accel/accel*/device/vendor")):
        yield without_torch("the AMD NPU")
    yield f"no AMD GPU ({SYSFS} shows none)"


def _selected(present: list[Gpu], name: str, environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that a variable of ROCm lists, by number or UUID: up to the first one that does not exist. Raises
    Unusable if it lists none."""
    if name not in environment:
        return present
    known = {str(number): gpu for number, gpu in enumerate(present)} | {gpu.uuid: gpu for gpu in present}
    listed = [known[one] for one in takewhile(known.__contains__, environment[name].replace(" ", "").split(","))]
    if not listed:
        raise Unusable(f"{name}={environment[name]} selects none of {len(present)} AMD GPUs")
    return listed


def _problems(selected: list[Gpu], numbered: list[Gpu]) -> Iterator[str]:
    """`numbered`: the GPUs in the numbers of HIP_VISIBLE_DEVICES."""
    gpu = selected[0]
    if not any(gpu.version):
        yield f"{DRIVER} of Linux {platform.release()} is too old for ROCm: update Linux or {DRIVER}"
    nodes = (DEVICES / "kfd", DEVICES / "dri" / gpu.node)
    missing = [str(node) for node in nodes if not node.exists()]
    if missing:
        yield f"{gpu.title} has no {' and '.join(missing)}: a container needs --device {nodes[0]} --device {nodes[1]}"
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        yield f"no permission for {' and '.join(closed)}: add your user to the groups render and video, log in again"
    folder = package_folder("torch")
    served = _served(folder) if folder else TARGETS
    if gpu.target not in served:
        yield from (
            f"torch's first GPU is {gpu.target}, for which it has no kernels: set {SELECT}={number} for {other.title}"
            for number, other in enumerate(numbered)
            if other.target in served
        )
        yield without_torch(gpu.title)
    present = f"{gpu.title} is present, but"
    if folder is None:
        yield f"{present} torch is not installed"
    if not rocm():
        yield f"{present} the installed torch was built without ROCm: install a torch with ROCm (see pytorch.org)"
