"""The ops of Intel GPUs: products by oneDNN, Triton kernels where Triton has a backend for Intel, else torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...kernels.onednn.attention import paged_attention
from ...kernels.onednn.linear import is_present, with_onednn
from ...kernels.ops import Ops
from ...kernels.ops.attention import Attention
from ...kernels.ops.register import REFERENCES, KernelSet
from ...kernels.triton import problem
from .installation import triton_problem

SDPA = KernelSet("sdpa", Ops(attention=replace(Attention(), paged=paged_attention)))


def _kernels() -> Iterator[KernelSet]:
    """The sets of kernels of this machine, the slowest first. Without an XPU build of torch they are only listed, and
    any Triton counts."""
    yield REFERENCES
    yield SDPA
    base = SDPA.ops
    if not (triton_problem() if torch.xpu._is_compiled() else problem.triton_problem()):
        from ...kernels.triton.ops import with_triton

        base = with_triton(Ops())
        yield KernelSet("triton", base)
    if is_present():
        yield KernelSet("onednn", with_onednn(base), base=base)


KERNELS = tuple(_kernels())[::-1]
OPS = KERNELS[0].ops
