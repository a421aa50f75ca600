"""Kernels in Triton, for GPUs that have a torch with Triton. Wrappers have the signatures of kernels/ops."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# What the kernels are tuned and judged with: Triton 3.9 warns where nobody says, and 3.10 will do without.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # what the kernels compute with


def takes(x: Tensor) -> bool:
    """Whether kernels compute with x. A tensor that a trace goes through has no memory: the reference is traced."""
    return x.dtype in FLOATS and not isinstance(x, FakeTensor)
