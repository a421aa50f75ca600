"""Where the kernel library of the CPU lies, or why there is none. Looking takes no tensor library."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "localllm_cpu.so"
CHOSEN = "LOCALLLM_CPU_LIBRARY"  # an environment variable that names another file

_HERE = Path(__file__).resolve().parent


class LibraryMissing(ImportError):
    """There is no kernel library for the CPU here, or torch cannot load it: the references are used instead."""


def find_library() -> Path:
    """The file LOCALLLM_CPU_LIBRARY names, else what a checkout has built, else what the package was installed with.

    Raises LibraryMissing.
    """
    if chosen := os.environ.get(CHOSEN):
        if Path(chosen).is_file():
            return Path(chosen)
        raise LibraryMissing(f"{CHOSEN} names {chosen}, which is no file")
    for folder in (_HERE.parent / "build" / "kernels", _HERE / "cpu"):
        if (folder / NAME).is_file():
            return folder / NAME
    raise LibraryMissing(
        "the CPU's kernels were not built, as when no C++20 compiler is at hand: install one (Debian: apt install g++) "
        "and install localllm again (in a checkout: make build)"
    )
