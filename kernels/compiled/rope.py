"""Rotary position embedding (cpu/layers/rope.cpp, cuda/layers/rope.cu), in place; kernels/ops/rope.py defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import rope as reference
from .arguments import FLOATS, ROTATIONS, has_dense_heads

_rope = torch.ops.localllm.rope.default


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not _supported(query, key, cos):
        return reference.rope(query, key, cos, sin)
    return _rotate(query, key, cos, sin, ROTATIONS["neox"])


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if not _supported(query, key, cos):
        return reference.interleaved_rope(query, key, cos, sin)
    return _rotate(query, key, cos, sin, ROTATIONS["interleaved"])


def _supported(query: Tensor, key: Tensor, cos: Tensor) -> bool:
    dtypes = {query.dtype, key.dtype} <= FLOATS and cos.dtype == torch.float32
    return dtypes and has_dense_heads(query) and has_dense_heads(key)


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, rotation: int) -> tuple[Tensor, Tensor]:
    cos = cos.contiguous()
    sin = sin.contiguous()
    _rope(query, cos, sin, rotation)
    _rope(key, cos, sin, rotation)
    return query, key
