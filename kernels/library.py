"""Where the kernel libraries of the CPU and of CUDA devices lie, or why there are none. Loading one takes torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

NAME, CUDA_NAME = "localllm_cpu.so", "localllm_cuda.so"
CHOSEN, CUDA_CHOSEN = "LOCALLLM_CPU_LIBRARY", "LOCALLLM_CUDA_LIBRARY"  # environment variables that name other files

_HERE = Path(__file__).resolve().parent


class LibraryMissing(ImportError):
    """There is no such kernel library here, or torch cannot load it: Triton or the references are used instead."""


def find_library() -> Path:
    """The file LOCALLLM_CPU_LIBRARY names, else what a checkout has built, else what the package was installed with.

    Raises LibraryMissing.
    """
    if found := _found(CHOSEN, _HERE.parent / "build" / "kernels" / NAME, _HERE / "cpu" / NAME):
        return found
    raise LibraryMissing(
        "the CPU's kernels were not built, as when no C++20 compiler is at hand: install one (Debian: apt install g++) "
        "and install localllm again (in a checkout: make build)"
    )


def find_cuda_library() -> Path:
    """The same of CUDA devices, by LOCALLLM_CUDA_LIBRARY."""
    package = find_spec(f"{__package__}.cuda")
    folders = [] if package is None else map(Path, package.submodule_search_locations or ())
    built = _HERE.parent / "build" / "kernels" / "cuda"
    if found := _found(CUDA_CHOSEN, *(folder / CUDA_NAME for folder in (built, *folders))):
        return found
    raise LibraryMissing("the CUDA kernels were not built: make build CUDA=1 builds them, with nvcc at hand")


def load_ops(library: Path, ops: Iterable[str], make: str) -> None:
    """Raises LibraryMissing where torch cannot load it, or it lacks one of these ops; `make` makes it anew."""
    import torch

    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryMissing(f"{library} cannot be loaded: {error}") from error
    lacking = [op for op in ops if not hasattr(torch.ops.localllm, op)]
    if lacking:
        raise LibraryMissing(f"{library} is of another version, without {', '.join(lacking)}: {make} makes it anew")


def _found(variable: str, *files: Path) -> Path | None:
    """What the variable names, else the first of these that there is."""
    if chosen := os.environ.get(variable):
        if Path(chosen).is_file():
            return Path(chosen)
        raise LibraryMissing(f"{variable} names {chosen}, which is no file")
    return next((file for file in files if file.is_file()), None)
