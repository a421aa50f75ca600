"""Causal convolutions of recurrent layers on the CPU (conv.cpp); kernels/ops/state.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS, state_arguments
from ...ops import state as reference
from ...ops.state import Conv, StateRows

MAX_WIDTH = 8  # MAX_CONV_WIDTH of kernels.h
_causal_conv = torch.ops.localllm.causal_conv.default


def conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    return _convolved(x, rows, target) if _is_supported(x, target) else reference.conv(x, rows, target)


def short_conv(x: Tensor, rows: StateRows, target: Conv) -> Tensor:
    if not _is_supported(x, target):
        return reference.short_conv(x, rows, target)
    return _convolved(x, rows, target, gated=True)


def _is_supported(x: Tensor, target: Conv) -> bool:
    dtypes = {x.dtype, target.weight.dtype} <= FLOATS and target.states.dtype == torch.float32
    return dtypes and len(target.weight) <= MAX_WIDTH


def _convolved(x: Tensor, rows: StateRows, target: Conv, *, gated: bool = False) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(x.shape[0], target.weight.shape[1])
    _causal_conv(out, x, *state_arguments(rows), target.weight, target.bias, target.states, gated)
    return out
