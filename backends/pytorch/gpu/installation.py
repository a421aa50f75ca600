"""The GPUs on the PCI bus and the installed packages, for the probes of AMD and Intel GPUs. Reads files only."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ....kernels.triton.problem import compiler_problem
from ...machine import text


class Unusable(Exception):
    """The machine has no GPU that torch can use. The message is shown to the user."""


@dataclass(frozen=True)
class PciGpu:
    """A GPU, by its folder in sysfs. The name of the folder is the PCI address."""

    folder: Path

    @property
    def device(self) -> int:
        """The PCI device ID."""
        return int(text(self.folder / "device") or "0", 16)

    @property
    def driver(self) -> str:
        """The driver of Linux, such as i915, amdgpu or vfio-pci; empty: none."""
        link = self.folder / "driver"
        return link.resolve().name if link.exists() else ""

    @property
    def node(self) -> str:
        """The name of the render node in /dev/dri; empty: none."""
        return next((node.name for node in sorted(self.folder.glob("drm/renderD*"))), "")


def pci_gpus(sysfs: Path, vendor: str, kinds: tuple[str, ...]) -> list[PciGpu]:
    """The GPUs of a vendor, in the order of their addresses. `kinds`: the beginnings of their PCI classes."""
    folders = sorted((sysfs / "bus" / "pci" / "devices").glob("*"))
    of_vendor = (folder for folder in folders if text(folder / "vendor") == vendor)
    return [PciGpu(folder) for folder in of_vendor if text(folder / "class").startswith(kinds)]


def package_folder(package: str) -> Path | None:
    """The folder of an installed package. Does not import it."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def triton_problem(backend: str, hint: str) -> str:
    """The reason why Triton cannot compile kernels for a GPU; empty if it can. `backend`: of Triton, amd or intel;
    `hint`: what to do if Triton lacks it."""
    folder = package_folder("triton")
    if folder is None:
        return "Triton is not installed"
    return compiler_problem() if (folder / "backends" / backend).exists() else f"the installed Triton has {hint}"
