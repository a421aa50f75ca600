"""Arguments of the compiled kernels: dtypes, layouts and the values of their enumerations.

For other dtypes the wrappers call the references.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
GATES = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}  # Activation in kernels.h
ROTATIONS = {"neox": 0, "interleaved": 1}  # Rotation in kernels.h


def heads_dense(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with the heads of a token contiguous; copies x only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
