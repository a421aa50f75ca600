"""The kernels of CUDA devices: CUDA C++ built into one library (`make build CUDA=1`).

Importing this package loads it, or raises LibraryMissing. Norms, gated activations, RoPE and the
embedding have their wrappers in kernels/elements.
"""

from __future__ import annotations

from .. import cpu  # noqa: F401  its library defines the schemas of ops that both libraries implement
from ..library import find_cuda_library, load_ops

# Ops that only this library defines. extend_attention is not listed: it exists only in builds for Hopper.
OWN = (
    "copy_cache_pages",
    "decode_attention",
    "decoder_step",
    "decoder_step_shared_bytes",
    "small_batch",
    "small_batch_fits",
)

load_ops(find_cuda_library(), OWN, "make build CUDA=1")
