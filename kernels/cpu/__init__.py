"""The kernels of the CPU: C++ built into one library of torch ops (`torch.ops.localllm`), and their wrappers here.

Importing this package loads the library, or raises LibraryMissing where there is none: it is built at installation if
a C++ compiler is at hand. Wrappers have the signatures of kernels/ops and call the reference for what no kernel covers.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..library import find_library, load_ops

# The ops that answer in tensors they are handed: tracing them leaves nothing to make up.
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
torch.ops.localllm.use_lane(os.environ.get("LOCALLLM_CPU_LANE", ""))
