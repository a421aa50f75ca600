"""Dtypes and layouts that the compiled kernels accept; wrappers use the references for all others."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})


def heads_dense(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with the heads of a token side by side; a copy only where they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
