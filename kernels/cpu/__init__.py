"""The CPU kernels: a C++ library of torch ops (`torch.ops.localllm`), and their Python wrappers.

Importing this package loads the library, or raises LibraryMissing if there is none. The installation builds the library
if it finds a C++ compiler. Wrappers have the signatures of kernels/ops; for arguments that no kernel supports they call
the reference.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..library import find_library, load_ops

# Ops that write into output tensors passed in and return nothing: their fake implementations can be empty.
WRITING = (
    "rms_norm add_rms_norm layer_norm gate rope store copy_pages append attention pack linear embedding greedy draw "
    "mask logprob layer first_touch"
).split()


def _load(library: Path) -> None:
    load_ops(library, WRITING, "make build")
    for op in WRITING:
        torch.library.register_fake(f"localllm::{op}", _nothing, allow_override=True)


def _nothing(*_: object) -> None:
    pass


_load(find_library())
torch.ops.localllm.use_variant(os.environ.get("LOCALLLM_CPU_LANE", ""))
