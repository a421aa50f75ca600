"""The Intel GPUs that Linux lists, from sysfs. Starts no driver and imports no tensor library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..machine import text
from ..pytorch.gpu.installation import PciGpu, pci_gpus

INTEL = "0x8086"
DISPLAY = "0x03"  # PCI class of display controllers
INTEGRATED = "0000:00:02.0"  # PCI address of the GPU in a processor
APERTURE = 2**28  # bytes of the memory region of a GPU if the firmware has no resizable BAR


class Family(NamedTuple):
    """GPUs whose PCI device IDs have the same high byte."""

    title: str
    linux: tuple[int, int] = (0, 0)  # the first version whose driver takes them; (0, 0): unknown


# High byte of the device ID -> GPUs for which torch's XPU wheels have kernels.
FAMILIES: Mapping[int, Family] = {
    0x0B: Family("Data Center GPU Max"),
    0x56: Family("Arc A-series", (6, 2)),
    0x64: Family("Lunar Lake graphics", (6, 12)),
    0x7D: Family("Meteor Lake or Arrow Lake graphics", (6, 7)),
    0xB0: Family("Panther Lake graphics"),
    0xE2: Family("Arc B-series", (6, 12)),
}

# Device ID -> GiB of memory, of A730M, A380, B580, B570 and Pro B60. The size of a memory region is a power of two, so
# it is larger than the memory of these GPUs.
MEMORY: Mapping[int, int] = {0x5691: 12, 0x56A5: 6, 0xE20B: 12, 0xE20C: 10, 0xE211: 24}


class Card(PciGpu):
    """A GPU of Intel."""

    @property
    def is_integrated(self) -> bool:
        return self.folder.name == INTEGRATED

    @property
    def family(self) -> Family | None:
        """None: torch has no kernels for this GPU."""
        return FAMILIES.get(self.device >> 8)

    @property
    def title(self) -> str:
        return f"Intel {self.family.title if self.family else 'graphics'} ({self.device:04x})"

    @property
    def memory(self) -> int:
        """Bytes of its own memory; 0: unknown, because the firmware has no resizable BAR."""
        regions = text(self.folder / "resource").splitlines()
        start, end, _ = (int(word, 16) for word in regions[2].split())
        size = end - start + 1
        return min(size, MEMORY.get(self.device, size) * 2**30) if size > APERTURE else 0


def cards(sysfs: Path) -> list[Card]:
    """The Intel GPUs in the order of their driver: those with their own memory first."""
    gpus = (Card(gpu.folder) for gpu in pci_gpus(sysfs, INTEL, (DISPLAY,)))
    return sorted(gpus, key=lambda gpu: gpu.is_integrated)
