"""The kernel of kernels/metal/rope_store.py for NVIDIA's GPUs; what it means and when it is right is said there."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx

from ..metal.rope_store import INPUTS, Rope, Store, fits, kernel, launched, reference, source

PLACE = """
    const uint3 at = make_uint3(threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z);
"""


def lines(rope: Rope) -> str:
    return PLACE + source(rope).replace("device T*", "T*")


def _cuda(rope: Rope) -> Any:
    return kernel(mx.fast.cuda_kernel, lines(rope), INPUTS if rope.freqs is None else (*INPUTS, "freqs"))


def prepared(q: mx.array, keys: mx.array, values: mx.array, rope: Rope) -> Store:
    """What computes `reference` for arrays like these."""
    dims, dtypes = (keys.shape[3], values.shape[3]), (q.dtype, keys.dtype, values.dtype)
    if mx.cuda.is_available() and fits(dims, dtypes, rope):
        return launched(_cuda, q, keys, values, rope)
    return partial(reference, rope=rope)
