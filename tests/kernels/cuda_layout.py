"""Weights in the layout of kernels/cuda/products/linear.py, which cannot be imported without the CUDA library."""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.ops.linear import Fp8, Int4
from localllm.kernels.triton.widen import Quantised


def in_blocks(values: Tensor) -> Tensor:
    """[outputs, subs] -> [outputs / 8, subs, 8]: the values of eight outputs are contiguous."""
    return values.unflatten(0, (-1, 8)).transpose(1, 2).contiguous()


def transposed(weight: Int4 | Fp8, device: str) -> Quantised:
    """The weight with its nibbles transposed in each 64 bytes, and its scales in blocks of eight outputs."""
    if isinstance(weight, Fp8):
        scale, data = in_blocks(weight.scale).to(device), weight.data.view(torch.uint8).to(device)
        return Quantised("fp8", data, scale, None, *data.shape, weight.group, records="transposed")
    data = torch.nn.functional.pad(weight.data, (0, -weight.data.shape[1] % 64))
    words = data.view(len(data), -1, 4, 4, 4).transpose(2, 3).reshape(len(data), -1)
    records = in_blocks((weight.scale.view(torch.int16).int() & 0xFFFF) | (weight.zero.int() << 16))
    sizes = len(data), weight.in_features, weight.group
    return Quantised("int4", words.to(device), records.to(device), None, *sizes, records="transposed")
