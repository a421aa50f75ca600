"""RMS norms with a gate on the CPU (gated_norm.cpp); kernels/ops/state.py defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS, heads_dense
from ...ops import state as reference
from ...ops.state import GateOrder

_gated_norm = torch.ops.localllm.gated_norm.default
_ORDERS = {"norm-gate": 0, "gate-norm": 1}  # values of the enum GateOrder in kernels.h


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, order: GateOrder) -> Tensor:
    if x.dtype != gate.dtype or not {x.dtype, weight.dtype} <= FLOATS:
        return reference.gated_norm(x, gate, weight, eps, order)
    x, gate = heads_dense(x), heads_dense(gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _gated_norm(out, x, gate, weight, eps, _ORDERS[order])
    return out
