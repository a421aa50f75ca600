"""The backend of AMD GPUs. This version finds the GPUs but has no runner for them yet."""

from __future__ import annotations

import re
from pathlib import Path

from ...engine.runner import DeviceInfo, Unavailable

name = "hip"

DRIVER = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_VERSION = re.compile(r"^\s*gfx_target_version\s+(\d+)\s*$", re.MULTILINE)


def probe() -> DeviceInfo | Unavailable:
    """Reads the GPUs from the kernel driver's list of compute nodes."""
    if not DRIVER.exists():
        return Unavailable(name, f"no AMD GPU driver ({DRIVER} not found)")
    targets = list(filter(None, map(_target, sorted(NODES.glob("*/properties")))))
    if not targets:
        return Unavailable(name, "the AMD GPU driver shows no GPU")
    return Unavailable(name, f"AMD GPU {', '.join(targets)} is present, but this version has no HIP runner yet")


def _target(properties: Path) -> str:
    """The compiler target of a compute node, e.g. `gfx942`; empty for a CPU, whose version is 0."""
    match = _VERSION.search(properties.read_text("ascii", errors="replace"))
    version = int(match[1]) if match else 0
    if version == 0:
        return ""
    major = version // 10000
    minor = version // 100 % 100
    stepping = version % 100
    return f"gfx{major}{minor:x}{stepping:x}"
