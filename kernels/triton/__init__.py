"""Triton kernels, for every GPU whose torch includes Triton. Wrappers have the signatures of kernels/ops."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..triton_problem import compiler_problem, driver_supported

# The kernels are tuned and tested with fused multiply-adds. Without this variable Triton 3.9 warns, and Triton 3.10
# does not fuse.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if compiler_problem() and driver_supported():
    from .. import triton_driver

    triton_driver.activate()

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})  # dtypes that the kernels support


def supports(x: Tensor) -> bool:
    """True if the kernels support x. False for the fake tensors that torch traces with: they have no memory, so the
    reference is traced."""
    return x.dtype in FLOATS and not isinstance(x, FakeTensor)
