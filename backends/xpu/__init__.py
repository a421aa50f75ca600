"""The backend of Intel GPUs. This version finds the GPUs but has no runner for them yet."""

from __future__ import annotations

from pathlib import Path

from ...engine.runner import DeviceInfo, Unavailable

name = "xpu"

RENDER_NODES = Path("/sys/class/drm")
INTEL = "0x8086"


def probe() -> DeviceInfo | Unavailable:
    """Reads the vendor of each GPU that the Linux kernel lists."""
    vendors = [file.read_text("ascii").strip() for file in sorted(RENDER_NODES.glob("renderD*/device/vendor"))]
    count = vendors.count(INTEL)
    if count == 0:
        return Unavailable(name, f"no Intel GPU ({RENDER_NODES} shows none)")
    return Unavailable(name, f"{count} Intel GPU present, but this version has no XPU runner yet")
