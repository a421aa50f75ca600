"""The reasons why this machine cannot use an Intel GPU. Reads files only."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..llamacpp_install import without_torch
from ..machine import text
from ..pytorch.gpu import installation
from ..pytorch.gpu.installation import Unusable, package_folder
from .cards import INTEL, Card, cards

SYSFS = Path("/sys")
NODES = Path("/dev/dri")
LEVEL_ZERO = "libze_intel_gpu.so.1"  # the driver that torch calls
LIBRARIES = tuple(map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")))
DRIVERS = ("i915", "xe")


def visible(environment: Mapping[str, str] = os.environ) -> list[Card]:
    """The GPUs that torch uses, its first one first: no integrated GPU beside another one. Raises Unusable."""
    gpus = cards(SYSFS)
    if not gpus:
        raise Unusable(_without_gpu())
    served = [gpu for gpu in _selected(gpus, environment) if gpu.family]
    if not served:
        raise Unusable(without_torch(", ".join(gpu.title for gpu in gpus)))
    own_memory = [gpu for gpu in served if not gpu.is_integrated]
    gpu, *others = own_memory or served
    reason = next(_problems(gpu), "")
    if reason:
        raise Unusable(reason)
    return [gpu, *others]


def triton_problem() -> str:
    """The reason why Triton cannot compile kernels for Intel GPUs; empty if it can."""
    return installation.triton_problem("intel", "no backend for Intel GPUs: install triton-xpu")


def _without_gpu() -> str:
    vendors = (text(file) for file in sorted(SYSFS.glob("class/accel/accel*/device/vendor")))
    return without_torch("the Intel NPU") if INTEL in vendors else f"no Intel GPU ({SYSFS} shows none)"


def _selected(gpus: list[Card], environment: Mapping[str, str]) -> list[Card]:
    """The GPUs that the variables of the driver and of SYCL select. Raises Unusable if they select none."""
    mask = environment.get("ZE_AFFINITY_MASK", "")
    numbers = {int(number) for number in re.findall(r"(?:^|,)(\d+)", mask)}
    masked = [gpu for number, gpu in enumerate(gpus) if not mask or number in numbers]
    if not masked:
        raise Unusable(f"ZE_AFFINITY_MASK={mask} selects none of {len(gpus)} Intel GPUs")
    selector = environment.get("ONEAPI_DEVICE_SELECTOR", "")
    devices = re.findall(r"(?:^|;)(?:level_zero|\*):([^;]+)", selector)
    numbers = {int(number) for number in re.findall(r"\d+", ",".join(devices))}
    is_all = not selector or (bool(devices) and not numbers)
    selected = [gpu for number, gpu in enumerate(masked) if is_all or number in numbers]
    if not selected:
        raise Unusable(f"ONEAPI_DEVICE_SELECTOR={selector} selects no Intel GPU of Level Zero")
    return selected


def _problems(gpu: Card) -> Iterator[str]:
    if gpu.driver not in DRIVERS:
        yield f"{gpu.title} is present, but {_driver_problem(gpu)}"
    node = NODES / gpu.node
    if not gpu.node or not node.exists():
        yield f"{gpu.title} has no device in {NODES}: a container needs --device {NODES}"
    if not os.access(node, os.R_OK | os.W_OK):
        yield f"no permission for {node}: add your user to the group render, then log in again"
    present = f"{gpu.title} is present, but"
    if not any((folder / LEVEL_ZERO).exists() for folder in LIBRARIES):
        yield f"{present} its driver Level Zero is missing: install {LEVEL_ZERO} (Debian: apt install libze-intel-gpu1)"
    torch = package_folder("torch")
    if torch is None:
        yield f"{present} torch is not installed"
    elif not any((torch / "lib").glob("*torch_xpu*")):
        yield f"{present} the installed torch was built without XPU: install a torch with XPU (see pytorch.org)"


def _driver_problem(gpu: Card) -> str:
    """The reason why no driver of DRIVERS has the GPU."""
    release = platform.release()
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if gpu.family and version < gpu.family.linux:
        needed = ".".join(map(str, gpu.family.linux))
        return f"Linux {release} is too old for it: update to Linux {needed} or newer"
    return f"its driver is {gpu.driver or 'missing'}, not {' or '.join(DRIVERS)}"
