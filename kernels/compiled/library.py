"""Finds the kernel libraries of the CPU and of CUDA devices, and loads their ops into torch.

Only `load_ops` imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

CPU_LIBRARY = "localllm_cpu.so"
CUDA_LIBRARY = "localllm_cuda.so"
# Environment variables with the path of another library file.
CPU_VARIABLE = "LOCALLLM_CPU_LIBRARY"
CUDA_VARIABLE = "LOCALLLM_CUDA_LIBRARY"

_KERNELS = Path(__file__).resolve().parents[1]


class LibraryNotFound(ValueError):
    """An environment variable names a library file that does not exist."""


class LibraryMissing(ImportError):
    """A kernel library is not installed, or torch cannot load it. Callers use Triton or the references instead."""


def find_library() -> Path:
    """Path of the CPU library: LOCALLLM_CPU_LIBRARY, else the build of a checkout, else the file in the package.

    Raises LibraryMissing, or LibraryNotFound for the variable.
    """
    checkout = _KERNELS.parent / "build" / "kernels" / CPU_LIBRARY
    package = _KERNELS / "cpu" / CPU_LIBRARY
    library = read_variable(CPU_VARIABLE) or _first_file(checkout, package)
    if library:
        return library
    raise LibraryMissing(
        "the CPU kernels were not built, perhaps because no C++20 compiler is installed: install one "
        "(Debian: apt install g++) and install localllm again (in a checkout: make build)"
    )


def find_cuda_library() -> Path:
    """Path of the CUDA library: LOCALLLM_CUDA_LIBRARY, else the build of a checkout (make build CUDA=1, or make wheel),
    else the file in the package.

    Raises LibraryMissing, or LibraryNotFound for the variable.
    """
    package = find_spec("..cuda", __package__)
    locations = package.submodule_search_locations if package else None
    build = _KERNELS.parent / "build"
    folders = [build / "kernels" / "cuda", build / "wheel" / "kernels" / "cuda", *map(Path, locations or ())]
    library = read_variable(CUDA_VARIABLE) or _first_file(*(folder / CUDA_LIBRARY for folder in folders))
    if library:
        return library
    raise LibraryMissing(
        "the CUDA kernels were not built: install a wheel of localllm that has them, or install nvcc and run "
        "make build CUDA=1"
    )


def isa_variants(library: Path) -> list[str]:
    """The ISA variants in a CPU library, the slowest first: cpu/isa/dispatch.cpp writes their names as text."""
    marker = re.search(rb"ISA variants:([ \w]+)\0", library.read_bytes())
    return marker[1].decode().split() if marker else []


def load_ops(library: Path, ops: Iterable[str], make: str) -> None:
    """Load the library into torch. `make`: the command that builds it.

    Raises LibraryMissing if torch cannot load the library or if it lacks one of `ops`.
    """
    import torch

    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryMissing(f"{library} cannot be loaded: {error}") from error
    missing = [op for op in ops if not hasattr(torch.ops.localllm, op)]
    if missing:
        raise LibraryMissing(f"{library} is of another version and lacks {', '.join(missing)}: run {make} again")


def read_variable(variable: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """The file that CPU_VARIABLE or CUDA_VARIABLE names; None if it is empty. Raises LibraryNotFound."""
    path = env.get(variable)
    if path and not Path(path).is_file():
        raise LibraryNotFound(f"{variable} names {path}, which is not a file")
    return Path(path) if path else None


def _first_file(*files: Path) -> Path | None:
    return next(filter(Path.is_file, files), None)
