"""Prints the registers and the occupancy of the kernels of a CUDA library, for each architecture of its machine code.

    python -m scripts.cuda_resources [LIBRARY]    default: the library of make wheel

A row is a kernel with all its instances; its numbers are those of the instance with the most registers. Occupancy is
the share of a multiprocessor's warps that the registers allow; shared memory, whose size the launch sets, can lower it.
The exit code is 1 if a kernel keeps variables in local memory (it spills registers, or indexes a local array).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

LIBRARY = Path("build/wheel/kernels/cuda/localllm_cuda.so")
REGISTERS = 1 << 16  # per multiprocessor, on all these GPUs
WARPS = {"80": 64, "86": 48, "89": 48, "90a": 64, "100": 64, "120": 48}  # largest number per multiprocessor
BLOCKS = {"80": 32, "86": 16, "89": 24, "90a": 32, "100": 32, "120": 24}
UNBOUNDED = 256  # threads per block of kernels that state no bound


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one compiled kernel."""

    kernel: str  # mangled name
    architecture: str
    registers: int  # per thread
    local: int  # bytes of local memory per thread: its stack
    threads: int  # largest number of threads per block


def cuobjdump() -> str:
    """The path of cuobjdump: NVIDIA's, or the copy in Triton. Raises FileNotFoundError."""
    installed = shutil.which("cuobjdump")
    triton = find_spec("triton")
    if installed is None and triton is not None and triton.origin is not None:
        installed = shutil.which("cuobjdump", path=Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    if installed is None:
        raise FileNotFoundError("cuobjdump is not installed; the toolkit of CUDA and Triton have it")
    return installed


def usages(library: Path) -> Iterator[Usage]:
    """The resources of every kernel in the machine code of `library`."""
    bounds = _bounds(library)
    architecture = kernel = ""
    for line in _dump("--dump-resource-usage", library):
        if match := re.match(r"arch = sm_(\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif match := re.match(r"\s*REG:(\d+) STACK:(\d+)", line):
            yield Usage(kernel, architecture, int(match[1]), int(match[2]), bounds.get(kernel, UNBOUNDED))


def occupancy(usage: Usage) -> float:
    """The share of a multiprocessor's warps that the registers of a kernel allow."""
    warps_per_block = -(-usage.threads // 32)
    registers_per_warp = -(-usage.registers * 32 // 256) * 256
    blocks = min(REGISTERS // (registers_per_warp * warps_per_block), BLOCKS[usage.architecture])
    warps = WARPS[usage.architecture]
    return min(blocks * warps_per_block, warps // warps_per_block * warps_per_block) / warps


def base_names(kernels: Iterable[str]) -> dict[str, str]:
    """Mangled name -> name without namespaces and template arguments."""
    mangled = list(dict.fromkeys(kernels))
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    names = {}
    for kernel, plain in zip(mangled, done.stdout.splitlines(), strict=True):
        without_namespaces = plain.replace("(anonymous namespace)::", "").replace("localllm::cuda::", "")
        match = re.match(r"(?:void )?(\w+)", without_namespaces)
        names[kernel] = match[1] if match else kernel
    return names


def _bounds(library: Path) -> dict[str, int]:
    """Kernel -> largest number of threads per block, for kernels that state it."""
    bounds = {}
    kernel = attribute = ""
    for line in _dump("--dump-elf", library):
        if match := re.match(r"\.nv\.info\.(\w+)", line):
            kernel = match[1]
        elif match := re.match(r"\s*Attribute:\s*(\w+)", line):
            attribute = match[1]
        elif attribute == "EIATTR_MAX_THREADS" and (match := re.match(r"\s*Value:\s*0x(\w+)", line)):
            bounds[kernel] = int(match[1], 16)
    return bounds


def _dump(option: str, library: Path) -> Iterator[str]:
    done = subprocess.run([cuobjdump(), option, library], capture_output=True, text=True, check=True)
    yield from done.stdout.splitlines()


def report(library: Path) -> int:
    """Print the table. Returns the exit code."""
    rows: dict[str, dict[str, list[Usage]]] = defaultdict(lambda: defaultdict(list))
    compiled = list(usages(library))
    names = base_names(usage.kernel for usage in compiled)
    for usage in compiled:
        rows[names[usage.kernel]][usage.architecture].append(usage)
    architectures = [name for name in WARPS if any(name in row for row in rows.values())]
    print(f"{library}: registers, occupancy; + bytes of local memory")
    print(f"{'kernel':<26}", *(f"{'sm_' + name:>12}" for name in architectures))
    local = 0
    for name, row in sorted(rows.items()):
        cells = []
        for architecture in architectures:
            instances = row.get(architecture, [])
            cells.append(f"{_cell(instances):>12}")
            local += sum(usage.local > 0 for usage in instances)
        print(f"{name:<26}", *cells)
    print(f"{local} instances use local memory" if local else "no kernel uses local memory")
    return 1 if local else 0


def _cell(instances: list[Usage]) -> str:
    if not instances:
        return "-"
    largest = max(instances, key=lambda usage: usage.registers)
    local = max(usage.local for usage in instances)
    return f"{largest.registers} {occupancy(largest):.0%}" + (f" +{local}" if local else "")


if __name__ == "__main__":
    sys.exit(report(Path(sys.argv[1]) if sys.argv[1:] else LIBRARY))
