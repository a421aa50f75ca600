"""The families of ops that the CPU library and the CUDA library both have."""

from __future__ import annotations

from ..ops.activation import Activation
from ..ops.norm import Norm
from ..ops.rope import Rope
from . import activation, norm, rope

NORM = Norm(rms=norm.rms_norm, add_rms=norm.add_rms_norm)
ACTIVATION = Activation(
    silu_and_mul=activation.silu_and_mul,
    gelu_and_mul=activation.gelu_and_mul,
    gelu_tanh_and_mul=activation.gelu_tanh_and_mul,
)
ROPE = Rope(neox=rope.rope, interleaved=rope.interleaved_rope)
