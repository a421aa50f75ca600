"""The kernels of CUDA devices: CUDA C++ built into one library (`make build CUDA=1`).

Importing this package loads it, or raises LibraryMissing. Norms, gated activations, RoPE and the
embedding have their wrappers in kernels/elements.
"""

from __future__ import annotations

from .. import cpu  # noqa: F401  its library has the schemas of what both compute
from ..library import find_cuda_library, load_ops

# What only this library has; extend_attention is in those alone that were compiled for Hopper.
OWN = ("copy_parts", "decode_attention", "decoder_step", "decoder_step_room", "few_rows", "few_rows_fits")

load_ops(find_cuda_library(), OWN, "make build CUDA=1")
