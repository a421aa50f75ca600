"""Arguments of the compiled kernels: dtypes, layouts and the values of their enumerations.

The wrappers call the references for tensors of other dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cpu  # noqa: F401  loads the library

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
GATES = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}  # values of the enum Activation in kernels.h
ROTATIONS = {"neox": 0, "interleaved": 1}  # values of the enum Rotation in kernels.h


def heads_dense(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with the heads of each token contiguous; a copy only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def has_dense_heads(x: Tensor) -> bool:
    """True if the heads of each token of x [tokens, heads, dim] are contiguous. Tokens may have any stride."""
    one_head = x.shape[1] == 1
    return x.stride(2) == 1 and (one_head or x.stride(1) == x.shape[2])
