"""Writes the compute nodes of AMD's driver into the folders of a machine (tests/backends/sysfs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..sysfs import AMD, Pci

GIB = 2**30


@dataclass(frozen=True)
class Radeon:
    """A GPU that the driver can compute on. `target`: its number in the driver, 110000 for gfx1100."""

    pci: Pci
    target: int
    memory: int = 0  # bytes
    used: int = 0  # bytes
    uuid: int = 0
    product: str = ""
    carved_out: int = 0  # bytes of main memory that the firmware gives to the GPU of a processor
    borrowed: int = 0  # bytes of other main memory that it uses


def radeon(address: str, device: int, target: int, node: str, memory: int = 0, **more: object) -> Radeon:
    return Radeon(Pci(address, AMD, device, "amdgpu", node), target, memory, **more)  # type: ignore[arg-type]


def write_nodes(machine: Path, gpus: Sequence[Radeon]) -> None:
    """Node 0 is the processor, as on a real machine."""
    _node(machine, 0, {"cpu_cores_count": 16, "gfx_target_version": 0, "vendor_id": 0}, {"heap_type": 0})
    for number, gpu in enumerate(gpus, 1):
        minor = int(gpu.pci.node.removeprefix("renderD"))
        properties = {
            "cpu_cores_count": 0,
            "simd_count": 192,
            "simd_per_cu": 2,
            "max_engine_clk_fcompute": 2500,
            "gfx_target_version": gpu.target,
            "vendor_id": 4098,
            "drm_render_minor": minor,
            "unique_id": gpu.uuid,
        }
        _node(machine, number, properties, {"heap_type": 1, "size_in_bytes": gpu.memory})
        folder = machine / "sys" / "class" / "drm" / gpu.pci.node / "device"
        folder.mkdir(parents=True)
        (folder / "product_name").write_text(f"{gpu.product}\n")
        counts = {"vram_used": gpu.used, "vram_total": gpu.carved_out or gpu.memory, "gtt_used": gpu.borrowed}
        for name, number in counts.items():
            (folder / f"mem_info_{name}").write_text(f"{number}\n")
    (machine / "dev" / "kfd").touch()


def _node(machine: Path, number: int, properties: dict[str, int], bank: dict[str, int]) -> None:
    folder = machine / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number)
    (folder / "mem_banks" / "0").mkdir(parents=True)
    for file, values in ((folder, properties), (folder / "mem_banks" / "0", {"size_in_bytes": 2**34} | bank)):
        lines = (f"{name} {value}\n" for name, value in values.items())
        (file / "properties").write_text("".join(lines))
