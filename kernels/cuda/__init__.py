"""The kernels of CUDA devices: CUDA C++ built into one library (`make build CUDA=1`).

Importing this package loads it, or raises LibraryMissing. The ops are those of `kernels.cpu` under another device, so
its wrappers of norms, gated activations, rotation and the embedding serve tensors of both.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..cpu import LibraryMissing

NAME = "localllm_cuda.so"
CHOSEN = "LOCALLLM_CUDA_LIBRARY"  # an environment variable that names another file


def find_library() -> Path:
    """What LOCALLLM_CUDA_LIBRARY names, else what a checkout has built, else what the package was installed with.

    Raises LibraryMissing.
    """
    if chosen := os.environ.get(CHOSEN):
        if Path(chosen).is_file():
            return Path(chosen)
        raise LibraryMissing(f"{CHOSEN} names {chosen}, which is no file")
    own = Path(__file__).resolve().parent
    for folder in (own.parent.parent / "build" / "kernels" / "cuda", own, *map(Path, __path__)):
        if (folder / NAME).is_file():
            return folder / NAME
    raise LibraryMissing("the CUDA kernels were not built: make build CUDA=1 builds them, with nvcc at hand")


# What only this library has; extend_attention is in those alone that were compiled for Hopper.
OWN = ("copy_parts", "decode_attention", "decoder_step", "decoder_step_room", "few_rows")


def _load(library: Path) -> None:
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise LibraryMissing(f"the CUDA kernels cannot be loaded: {error}") from error
    lacking = [op for op in OWN if not hasattr(torch.ops.localllm, op)]
    if lacking:
        raise LibraryMissing(
            f"{library} is of another version, without {', '.join(lacking)}: make build CUDA=1 makes it anew"
        )


_load(find_library())
