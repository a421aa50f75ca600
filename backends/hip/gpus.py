"""The AMD GPUs that the driver of Linux lists, from sysfs. Starts no driver and imports no tensor library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..machine import memory as main_memory
from ..machine import text

AMD = "0x1002"
KINDS = ("0x03", "0x12")  # PCI classes of display controllers and of processing accelerators
DRIVER = "amdgpu"
NODES = "class/kfd/kfd/topology/nodes"
FRAME_BUFFERS = (1, 2)  # heap types of the memory of a GPU, visible to the processor or not

# Multiplications of bfloat16 numbers per clock and compute unit, by the start of the target, from AMD's descriptions of
# the architectures. Other GPUs have OTHER_MULTIPLICATIONS.
MULTIPLICATIONS: Mapping[str, int] = {"gfx90a": 512, "gfx94": 1024, "gfx95": 2048, "gfx11": 256, "gfx12": 512}
OTHER_MULTIPLICATIONS = 128

_INTEGRATED = re.compile(r"gfx(902|909|90c|1013|1033|1035|1036|1103|115.)")  # the GPUs of processors
_PROPERTY = re.compile(r"^(\w+)[ \t]+(\d+)$", re.MULTILINE)


class Version(NamedTuple):
    """The version of an architecture: gfx90a has 9, 0, 10. Zeros: the driver is too old to name it."""

    major: int
    minor: int
    stepping: int

    @property
    def target(self) -> str:
        """The target of LLVM."""
        return f"gfx{self.major}{self.minor:x}{self.stepping:x}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that can compute."""

    version: Version
    product: str  # name of the card; empty: the driver does not know it
    uuid: str  # as in ROCR_VISIBLE_DEVICES
    node: str  # the name of the render node in /dev/dri
    units: int  # number of compute units
    clock: float  # maximum cycles per second
    memory: int  # bytes that ROCm can allocate
    free: int  # bytes of it that are free
    is_integrated: bool = False  # part of a processor: it shares the main memory
    carved_out: int = 0  # bytes of main memory that the firmware gives to an integrated GPU alone

    @property
    def target(self) -> str:
        return self.version.target

    @property
    def title(self) -> str:
        return f"{self.product or 'AMD GPU'} ({self.target})"

    @property
    def multiplications(self) -> float:
        """Maximum number of multiplications of bfloat16 numbers per second."""
        known = (number for start, number in MULTIPLICATIONS.items() if self.target.startswith(start))
        return next(known, OTHER_MULTIPLICATIONS) * self.units * self.clock


def gpus(sysfs: Path) -> list[Gpu]:
    """The GPUs in the order of ROCm. Those that this process may not read are left out, as in a container."""
    nodes = sorted((sysfs / NODES).glob("[0-9]*"), key=lambda node: int(node.name))
    with_properties = ((node, _properties(node / "properties")) for node in nodes)
    return [_gpu(sysfs, node, properties) for node, properties in with_properties if properties.get("simd_count")]


def _gpu(sysfs: Path, folder: Path, properties: Mapping[str, int]) -> Gpu:
    """`folder`: of the compute node. `properties`: of the same node."""
    node = f"renderD{properties.get('drm_render_minor', 0)}"
    device = sysfs / "class" / "drm" / node / "device"
    number = properties.get("gfx_target_version", 0)
    version = Version(number // 10000, number // 100 % 100, number % 100)
    banks = map(_properties, folder.glob("mem_banks/*/properties"))
    size = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in FRAME_BUFFERS)
    is_integrated = bool(_INTEGRATED.fullmatch(version.target))
    carved_out = _number(device / "mem_info_vram_total") if is_integrated else 0
    free = size - _number(device / "mem_info_vram_used")
    if is_integrated and size > carved_out:  # ROCm allocates main memory outside the carve-out: the GTT domain
        free = min(size - _number(device / "mem_info_gtt_used"), main_memory()[1])
    return Gpu(
        version,
        text(device / "product_name"),
        f"GPU-{properties.get('unique_id', 0):016x}",
        node,
        properties["simd_count"] // properties.get("simd_per_cu", 2),
        properties.get("max_engine_clk_fcompute", 0) * 1e6,
        size,
        max(0, free),
        is_integrated,
        carved_out,
    )


def _number(file: Path) -> int:
    return int(text(file) or 0)


def _properties(file: Path) -> dict[str, int]:
    return {name: int(number) for name, number in _PROPERTY.findall(text(file))}
