"""Builds folders like /sys and /dev of Linux machines with GPUs, for the probes of backends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

INTEL, AMD, NVIDIA = "0x8086", "0x1002", "0x10de"


@dataclass(frozen=True)
class Pci:
    """A PCI device. `region`: bytes of its memory region (BAR 2). `node`: its render node; empty: none."""

    address: str
    vendor: str
    device: int
    driver: str = ""
    node: str = ""
    region: int = 2**28
    kind: str = "0x030000"  # VGA controller

    def write(self, machine: Path) -> None:
        sysfs = machine / "sys"
        folder = sysfs / "bus" / "pci" / "devices" / self.address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{self.vendor}\n")
        (folder / "device").write_text(f"0x{self.device:04x}\n")
        (folder / "class").write_text(f"{self.kind}\n")
        starts = (0x6001000000, 0, 0x4000000000)
        sizes = (2**24, 1, self.region)
        regions = zip(starts, sizes, strict=True)
        lines = (f"{start:#018x} {start + size - 1:#018x} 0x14220c\n" for start, size in regions)
        (folder / "resource").write_text("".join(lines))
        if self.driver:
            target = sysfs / "bus" / "pci" / "drivers" / self.driver
            target.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(target)
        if self.node:
            (folder / "drm" / self.node).mkdir(parents=True)
            (machine / "dev" / "dri").mkdir(parents=True, exist_ok=True)
            (machine / "dev" / "dri" / self.node).touch()


def write_machine(machine: Path, *devices: Pci, npu: str = "") -> None:
    """Write the folders `sys` and `dev` of a machine. `npu`: the vendor of an NPU in the processor; empty: none."""
    (machine / "sys").mkdir()
    (machine / "dev" / "dri").mkdir(parents=True)
    for device in devices:
        device.write(machine)
    if npu:
        folder = machine / "sys" / "class" / "accel" / "accel0" / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{npu}\n")
