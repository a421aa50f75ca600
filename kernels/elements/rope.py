"""Rotary position embedding (rope.cpp, rope.cu), in place; kernels/ops/rope.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import rope as reference
from .arguments import FLOATS, ROTATIONS

_rope = torch.ops.localllm.rope.default


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not (_covered(query, cos) and _covered(key, cos)):
        return reference.rope(query, key, cos, sin)
    return _rotated(query, key, cos, sin, ROTATIONS["neox"])


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not (_covered(query, cos) and _covered(key, cos)):
        return reference.interleaved_rope(query, key, cos, sin)
    return _rotated(query, key, cos, sin, ROTATIONS["interleaved"])


def _covered(x: Tensor, cos: Tensor) -> bool:
    """True if the heads of a token are contiguous. Tokens may have a larger stride."""
    return (
        x.dtype in FLOATS
        and cos.dtype == torch.float32
        and x.stride(2) == 1
        and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    )


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    cos = cos.contiguous()
    sin = sin.contiguous()
    _rope(query, cos, sin, rotation)
    _rope(key, cos, sin, rotation)
    return query, key
