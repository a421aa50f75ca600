"""The XPU's ops on the CPU: torch's int4 product for Intel GPUs gets a CPU kernel, from its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.backends.xpu.device import DEVICE
from localllm.backends.xpu.ops import SDPA
from localllm.kernels.onednn.linear import OP, with_onednn
from localllm.kernels.ops.register import REFERENCES, KernelSet

from ...accelerator import INTERPRETED
from ..other_device import on_cpu

# Triton is left out, except in its interpreter (test_gpus_interpreted.py).
WITHOUT_TRITON = (KernelSet("onednn", with_onednn(SDPA.ops), base=SDPA.ops), SDPA, REFERENCES)
KERNELS = DEVICE.kernels if INTERPRETED else WITHOUT_TRITON
XPU = on_cpu(DEVICE, KERNELS)


def int4_product(x: Tensor, words: Tensor, group: int, scale: Tensor, zero: Tensor) -> Tensor:
    """x [rows, in] times words [out, in / 8], with a scale and a zero [groups, out] -> [rows, out].

    Refuses what the kernel of torch 2.13 refuses.
    """
    assert x.dim() == words.dim() == scale.dim() == zero.dim() == 2
    assert x.is_contiguous()
    assert (words.dtype, zero.dtype, scale.dtype) == (torch.int32, torch.int8, x.dtype)
    assert group > 1
    assert group % 32 == 0
    assert scale.shape == zero.shape == (x.shape[1] // group, len(words))
    assert x.shape[1] == 8 * words.shape[1]
    assert min(x.shape) > 0
    shifts = torch.arange(0, 32, 4)
    numbers = (words.unsqueeze(-1) >> shifts & 15).flatten(1)
    spread = (part.repeat_interleave(group, 0).t().double() for part in (zero, scale))
    weight = (numbers - next(spread)) * next(spread)
    return (x.double() @ weight.t()).to(x.dtype)


LIBRARY = torch.library.Library("aten", "IMPL", "CPU")
LIBRARY.impl(OP, int4_product)
