"""The kernels of the CPU: C++ built into one library of torch ops (`torch.ops.localllm`), and their wrappers here.

Importing this package loads the library, or raises LibraryMissing where there is none: it is built at installation if
a C++ compiler is at hand. Wrappers have the signatures of kernels/ops and call the reference for what no kernel covers.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

NAME = "localllm_cpu.so"

_WRITING = (
    "rms_norm add_rms_norm layer_norm gate rope store copy_pages append attention pack linear embedding greedy draw "
    "mask logprob layer advise_huge"
).split()


class LibraryMissing(ImportError):
    """There is no kernel library for the CPU here, or torch cannot load it: the references are used instead."""


def find_library() -> Path:
    """LOCALLLM_CPU_LIBRARY, else what a checkout has built, else what the package was installed with.

    Raises LibraryMissing.
    """
    if chosen := os.environ.get("LOCALLLM_CPU_LIBRARY"):
        if Path(chosen).is_file():
            return Path(chosen)
        raise LibraryMissing(f"LOCALLLM_CPU_LIBRARY names {chosen}, which is no file")
    own = Path(__file__).resolve().parent
    for folder in (own.parent.parent / "build" / "kernels", own, *map(Path, __path__)):
        if (folder / NAME).is_file():
            return folder / NAME
    raise LibraryMissing("the CPU's kernels were not built: no C++ compiler was found when localllm was installed")


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryMissing(f"{library} cannot be loaded: {error}") from error
    for op in _WRITING:  # they answer in what they are handed, so tracing them leaves nothing to make up
        torch.library.register_fake(f"localllm::{op}", _nothing, allow_override=True)


def _nothing(*_: object) -> None:
    pass


_load(find_library())
torch.ops.localllm.use_lane(os.environ.get("LOCALLLM_CPU_LANE", ""))
