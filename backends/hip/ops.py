"""The ops of AMD GPUs: the Triton kernels, else the references."""

from __future__ import annotations

import torch

from ...kernels.ops import Ops
from ...kernels.ops.register import REFERENCES, KernelSet
from ...kernels.triton import problem
from .installation import triton_problem


def _kernels() -> tuple[KernelSet, ...]:
    """The sets of kernels of this machine, the fastest first. Without a ROCm build of torch they are only listed, and
    any Triton counts."""
    if triton_problem() if torch.version.hip else problem.triton_problem():
        return (REFERENCES,)
    from ...kernels.triton.ops import with_triton

    return KernelSet("triton", with_triton(Ops())), REFERENCES


KERNELS = _kernels()
OPS = KERNELS[0].ops
