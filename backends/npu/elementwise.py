"""Norms, gated activations and rotations on the NPU.

A dtype or a shape that an op of torch_npu does not have is computed by the reference, on the NPU too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.ops import norm as norms
from ...kernels.ops import rope as ropes
from ...kernels.ops.activation import SWIGLU_LIMIT, Activation
from ...kernels.ops.norm import Norm
from ...kernels.ops.rope import Rope

MAX_HEADS = 1000  # of npu_rotary_mul
ROTARY_UNIT = 16  # npu_mrope rotates a multiple of so many float32 dimensions


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See kernels.ops.norm.rms_norm."""
    if offset not in (0.0, 1.0):
        return norms.rms_norm(x, weight, eps, offset)
    op = torch.ops.npu.npu_gemma_rms_norm if offset else torch.ops.npu.npu_rms_norm
    output: Tensor = op(x.contiguous(), weight.to(x.dtype), epsilon=eps)[0]  # npu_gemma_rms_norm requires it
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """See kernels.ops.norm.add_rms_norm."""
    if offset:
        total = x + residual
        return rms_norm(total, weight, eps, offset), total
    output, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight.to(x.dtype), epsilon=eps)
    return output, total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.ops.activation.silu_and_mul."""
    output: Tensor = torch.ops.npu.npu_swiglu(gate_up, dim=-1)
    return output


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.ops.activation.gelu_and_mul."""
    return _geglu(gate_up, 0)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.ops.activation.gelu_tanh_and_mul."""
    return _geglu(gate_up, 1)


def _geglu(gate_up: Tensor, approximate: int) -> Tensor:
    """`approximate`: 0: the error function; 1: tanh. The gates are the left half."""
    output: Tensor = torch.ops.npu.npu_geglu(gate_up, dim=-1, approximate=approximate, activate_left=True)[0]
    return output


def clamped_swiglu_and_mul(gate_up: Tensor) -> Tensor:
    """See kernels.ops.activation.clamped_swiglu_and_mul. npu_fast_gelu(x) is x * sigmoid(1.702 * x)."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated: Tensor = torch.ops.npu.npu_fast_gelu(gate.clamp(max=SWIGLU_LIMIT))
    return activated * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.ops.rope.rope."""
    return _rotate(query, key, cos, sin, "half")


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See kernels.ops.rope.interleaved_rope."""
    return _rotate(query, key, cos, sin, "interleave")


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Rotate in float32, as the reference does: cos and sin in bfloat16 would lose half of their digits."""
    dim = query.shape[-1]
    rotary = 2 * cos.shape[-1]
    tokens, heads, _ = query.shape
    if rotary == dim and max(heads, key.shape[1]) < MAX_HEADS:
        tables = _spread(cos, mode), _spread(sin, mode), mode
        return _rotary_mul(query, *tables), _rotary_mul(key, *tables)
    if rotary % ROTARY_UNIT:
        reference = ropes.rope if mode == "half" else ropes.interleaved_rope
        return reference(query, key, cos, sin)
    positions = torch.arange(tokens, device=query.device)
    rotated = torch.ops.npu.npu_mrope(
        positions,
        query.flatten(1).float(),
        key.flatten(1).float(),
        torch.cat((cos, sin), dim=-1),
        dim,
        mrope_section=[0, 0, 0],
        rotary_mode=mode,
    )
    new_query, new_key = (flat.view(old.shape).to(old.dtype) for flat, old in zip(rotated, (query, key), strict=True))
    return new_query, new_key


def _spread(table: Tensor, mode: str) -> Tensor:
    """[tokens, half] -> [1, tokens, 1, 2 * half], with the value of a pair at both of its dimensions."""
    both = torch.cat((table, table), dim=-1) if mode == "half" else table.repeat_interleave(2, dim=-1)
    return both[None, :, None]


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    rotated: Tensor = torch.ops.npu.npu_rotary_mul(x[None].float(), cos, sin, mode)
    return rotated[0].to(x.dtype)


NORM = Norm(rms=rms_norm, add_rms=add_rms_norm)
ACTIVATION = Activation(silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, clamped_swiglu_and_mul)
ROPE = Rope(rope, interleaved_rope)
