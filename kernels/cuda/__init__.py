"""The kernels of CUDA devices: CUDA C++ built into one library (`make build CUDA=1`).

Importing this package loads it, or raises LibraryMissing. The ops are those of `kernels.cpu` under another device, so
its wrappers of norms, gated activations, rotation and the embedding serve tensors of both.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..cpu import LibraryMissing  # whose library has the schemas of what both compute
from ..library import find_cuda_library

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


_load(find_cuda_library())
