"""AMD GPUs through ROCm. This version finds them but has no runner for them yet."""

from __future__ import annotations

from pathlib import Path

from ...engine.runner import DeviceInfo, Unavailable

name = "hip"

DRIVER = Path("/dev/kfd")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def probe() -> DeviceInfo | Unavailable:
    """Reads the kernel driver's list of compute nodes."""
    if not DRIVER.exists():
        return Unavailable(name, f"no AMD GPU driver ({DRIVER} not found)")
    targets = [target for node in sorted(NODES.glob("*/properties")) if (target := _target(node))]
    if not targets:
        return Unavailable(name, "the AMD GPU driver shows no GPU")
    return Unavailable(name, f"AMD GPU {', '.join(targets)} is present, but this version has no HIP runner yet")


def _target(properties: Path) -> str:
    """`gfx942` of a GPU node; empty for a CPU node, whose version is 0."""
    lines = (line.split() for line in properties.read_text("ascii", errors="replace").splitlines())
    version = next((int(line[1]) for line in lines if line[:1] == ["gfx_target_version"] and len(line) == 2), 0)
    major, minor, step = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{step:x}" if version else ""
