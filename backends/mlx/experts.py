"""Our own kernel for the experts of mlx-lm's models, where it was asked for."""

from __future__ import annotations

import os

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU

from ...kernels.metal.swiglu import BITS, GROUP, Experts, swiglu

ASKED = "LOCALLLM_METAL_KERNELS"
SORTED = 64  # choices from which on mlx-lm sorts tokens by expert, which pays more than one launch less


class FusedExperts(SwitchGLU):
    """Takes the place of a SwitchGLU whose projections fit; for few tokens only."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if indices.size >= SORTED:
            found: mx.array = super().__call__(x, indices)
            return found
        tokens, chosen = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
        inner = swiglu(tokens, _weights(self.gate_proj), _weights(self.up_proj), chosen)
        out = self.down_proj(inner[:, :, None], chosen).squeeze(-2)
        return out.reshape(*indices.shape, -1)


def use_kernels(model: nn.Module) -> int:
    """Put our kernel to use where it fits, if LOCALLLM_METAL_KERNELS is 1; returns in how many layers."""
    if os.environ.get(ASKED) != "1":
        return 0
    fitting = [part for part in model.modules() if type(part) is SwitchGLU and _fits(part)]
    for part in fitting:
        part.__class__ = FusedExperts
    return len(fitting)


def _fits(part: SwitchGLU) -> bool:
    sides = part.gate_proj, part.up_proj
    return isinstance(part.activation, SwiGLU) and all(
        isinstance(side, QuantizedSwitchLinear)
        and (side.mode, side.bits, side.group_size) == ("affine", BITS, GROUP)
        and "bias" not in side
        for side in sides
    )


def _weights(side: nn.Module) -> Experts:
    return Experts(side.weight, side.scales, side.biases)
