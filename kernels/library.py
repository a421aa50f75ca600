"""Finds the kernel libraries of the CPU and of CUDA devices, and loads their ops into torch.

Only `load_ops` imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

NAME = "localllm_cpu.so"
CUDA_NAME = "localllm_cuda.so"
# Environment variables with the path of another library file.
CHOSEN = "LOCALLLM_CPU_LIBRARY"
CUDA_CHOSEN = "LOCALLLM_CUDA_LIBRARY"

_HERE = Path(__file__).resolve().parent


class LibraryMissing(ImportError):
    """A kernel library is not installed, or torch cannot load it. Callers use Triton or the references instead."""


def find_library() -> Path:
    """Path of the CPU library: LOCALLLM_CPU_LIBRARY, else the build of a checkout, else the file in the package.

    Raises LibraryMissing.
    """
    checkout = _HERE.parent / "build" / "kernels" / NAME
    package = _HERE / "cpu" / NAME
    if library := _found(CHOSEN, checkout, package):
        return library
    raise LibraryMissing(
        "the CPU kernels were not built, perhaps because no C++20 compiler is installed: install one "
        "(Debian: apt install g++) and install localllm again (in a checkout: make build)"
    )


def find_cuda_library() -> Path:
    """Path of the CUDA library: LOCALLLM_CUDA_LIBRARY, else the build of a checkout, else the file in the package.

    Raises LibraryMissing.
    """
    package = find_spec(f"{__package__}.cuda")
    folders = [] if package is None else map(Path, package.submodule_search_locations or ())
    built = _HERE.parent / "build" / "kernels" / "cuda"
    if library := _found(CUDA_CHOSEN, *(folder / CUDA_NAME for folder in (built, *folders))):
        return library
    raise LibraryMissing("the CUDA kernels were not built: install nvcc and run make build CUDA=1")


def load_ops(library: Path, ops: Iterable[str], make: str) -> None:
    """Load the library into torch. `make`: the command that builds it.

    Raises LibraryMissing if torch cannot load the library or if it lacks one of `ops`.
    """
    import torch

    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryMissing(f"{library} cannot be loaded: {error}") from error
    lacking = [op for op in ops if not hasattr(torch.ops.localllm, op)]
    if lacking:
        raise LibraryMissing(f"{library} is of another version, without {', '.join(lacking)}: {make} rebuilds it")


def _found(variable: str, *files: Path) -> Path | None:
    """The path in the environment variable, else the first of `files` that exists.

    Raises LibraryMissing if the variable's path is not a file.
    """
    if path := os.environ.get(variable):
        if Path(path).is_file():
            return Path(path)
        raise LibraryMissing(f"{variable} names {path}, which is no file")
    return next((file for file in files if file.is_file()), None)
