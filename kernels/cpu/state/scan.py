"""Recurrences on the CPU: Gated DeltaNet and Mamba2 (scan.cpp); kernels/ops/state.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS, state_arguments
from ...ops import state as reference
from ...ops.state import Delta, Ssd, StateRows

_gated_delta = torch.ops.localllm.gated_delta.default
_ssd = torch.ops.localllm.ssd.default


def gated_delta(qkv: Tensor, a: Tensor, b: Tensor, rows: StateRows, target: Delta) -> Tensor:
    if not _is_supported(target.states, qkv, a, b):
        return reference.gated_delta(qkv, a, b, rows, target)
    qkv, a, b = map(_dense_rows, (qkv, a, b))
    out = qkv.new_empty(len(qkv), target.states.shape[1], target.states.shape[3])
    _gated_delta(out, qkv, a, b, *state_arguments(rows), target.rates, target.dt_bias, target.states)
    return out


def ssd(x: Tensor, dt: Tensor, rows: StateRows, target: Ssd) -> Tensor:
    if not _is_supported(target.states, x, dt):
        return reference.ssd(x, dt, rows, target)
    x, dt = map(_dense_rows, (x, dt))
    out = x.new_empty(len(x), target.states.shape[1], target.states.shape[3])
    per_head = target.rates, target.dt_bias, target.skip, target.dt_min, target.dt_max
    _ssd(out, x, dt, *state_arguments(rows), *per_head, target.states)
    return out


def _is_supported(states: Tensor, *inputs: Tensor) -> bool:
    dtypes = {each.dtype for each in inputs}
    return len(dtypes) == 1 and dtypes <= FLOATS and states.dtype == torch.float32


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
