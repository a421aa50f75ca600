"""The kernels of CUDA devices: CUDA C++ built into one library (`make build CUDA=1`).

Importing this package loads the library, or raises LibraryMissing. kernels/compiled has the wrappers of norms, gated
activations, RoPE and the embedding.
"""

from __future__ import annotations

import torch

from .. import cpu  # noqa: F401  its library defines the schemas of ops that both libraries implement
from ..compiled.library import find_cuda_library, load_ops
from ..gpu.limits import gpu_limits

# Ops that only this library defines. prefill_attention is not listed: it exists only in builds for Hopper.
CUDA_OPS = (
    "choice_products",
    "copy_cache_pages",
    "decode_attention",
    "decoder_step",
    "decoder_step_shared_bytes",
    "prefill_attention_mma",
    "limit_gpu",
    "lora_expand",
    "lora_shrink",
    "round_groups",
    "small_batch",
    "small_batch_fits",
    "small_batch_lora",
    "tiled_product",
    "widen",
)

load_ops(find_cuda_library(), CUDA_OPS, "make build CUDA=1")


def _limit_gpu() -> None:
    """Pass the limits of gpu_limits to the library."""
    limits = gpu_limits()
    capability = limits.capability or (0, 0)
    torch.ops.localllm.limit_gpu.default(*capability, limits.processors or 0, limits.shared or 0)


_limit_gpu()
