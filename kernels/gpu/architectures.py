"""The GPUs that a CUDA library contains code for. The library has their names as text, which cuda/architectures.cpp
writes, so reading them needs no torch and no GPU."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

from ..compiled.library import LibraryMissing

_MARK = b"localllm CUDA architectures: "
_NAME = re.compile(
    r"(\d+)(\d)(a?)(|-real|-virtual)"
)  # as in CMake: 80-real, 80-virtual, 90a-real, or 120 for both kinds


@dataclass(frozen=True, slots=True)
class Architecture:
    """Code for GPUs of one compute capability.

    `real`: machine code, for this capability and later ones with the same major number. `virtual`: PTX, which the
    driver compiles for this capability and all later ones. `specific`: for GPUs of exactly this capability (9.0a).
    """

    capability: tuple[int, int]
    real: bool
    virtual: bool
    specific: bool = False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        if self.specific:
            return capability == self.capability
        later = capability >= self.capability
        same_major = capability[0] == self.capability[0]
        return later and (self.virtual or (self.real and same_major))

    def __str__(self) -> str:
        major, minor = self.capability
        suffix = "a" if self.specific else ""
        later = " and later (PTX)" if self.virtual else ""
        return f"{major}.{minor}{suffix}{later}"


def read_architectures(library: Path) -> tuple[Architecture, ...]:
    """The architectures of a CUDA library; empty if the file does not name them, or has names such as `native`."""
    with library.open("rb") as file:
        if library.stat().st_size == 0:
            return ()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = data.find(_MARK)
            text = data[start + len(_MARK) : data.find(b"\0", start)].decode("ascii", "replace") if start >= 0 else ""
    matches = [_NAME.fullmatch(name) for name in text.split()]
    return tuple(_architecture(match) for match in matches if match) if all(matches) else ()


def require_code(library: Path, capability: tuple[int, int]) -> None:
    """Raises LibraryMissing if a GPU cannot run the library's kernels. A library that names no architectures passes."""
    architectures = read_architectures(library)
    if not architectures or any(architecture.runs_on(capability) for architecture in architectures):
        return
    names = ", ".join(map(str, architectures))
    number = ".".join(map(str, capability))
    raise LibraryMissing(
        f"{library} has kernels for compute capability {names}, and this GPU has {number}: run make build CUDA=1, or "
        "install a wheel of localllm"
    )


def _architecture(match: re.Match[str]) -> Architecture:
    kind = match[4]
    return Architecture((int(match[1]), int(match[2])), kind != "-virtual", kind != "-real", bool(match[3]))
