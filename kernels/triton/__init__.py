"""Triton kernels, for every GPU whose torch includes Triton. Wrappers have the signatures of kernels/ops."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# The kernels are tuned and tested with fused multiply-adds: Triton 3.9 warns if the variable is unset, and the default
# of 3.10 is off.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes that the kernels support


def takes(x: Tensor) -> bool:
    """True if the kernels support x. While torch traces, tensors are fake and have no memory: the reference is
    traced."""
    return x.dtype in FLOATS and not isinstance(x, FakeTensor)
