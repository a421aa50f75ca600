"""The CPU kernels: a C++ library of torch ops (`torch.ops.localllm`), and their Python wrappers.

Importing this package loads the library; it raises LibraryMissing if the library is not installed, or if it
has no ISA variant for this processor. The installation builds the library if it finds a C++ compiler. Wrappers have the
signatures of kernels/ops. For arguments that no kernel supports, they call the reference.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..compiled.library import LibraryMissing, find_library, load_ops

# Ops that write their results into tensor arguments and return nothing, so their fake implementations are empty.
OPS_WITHOUT_RESULT = (
    "rms_norm add_rms_norm gate rope store copy_pages append attention latent_attention pack linear route "
    "experts routed_experts embedding lora_add lora_embedding causal_conv gated_delta ssd gated_norm greedy draw mask "
    "logprob layer layers first_touch"
).split()


def _load(library: Path) -> None:
    load_ops(library, OPS_WITHOUT_RESULT, "make build")
    try:
        torch.ops.localllm.variants()
    except RuntimeError as error:
        raise LibraryMissing(str(error)) from error
    for op in OPS_WITHOUT_RESULT:
        torch.library.register_fake(f"localllm::{op}", _nothing, allow_override=True)


def _nothing(*_: object) -> None:
    pass


_load(find_library())
torch.ops.localllm.use_variant(os.environ.get("LOCALLLM_CPU_LANE", ""))
