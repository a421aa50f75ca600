"""Rotary position embedding (Su et al., 2021). It rotates pairs of dimensions: (i, i + half) in "neox", (2i, 2i + 1) in
"interleaved"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + half) of every head, for i < half. Dimensions from 2 * half on stay unchanged.

    query [tokens, heads, dim], key [tokens, kv heads, dim]; cos and sin [tokens, half] float32 for each token's
    position, including RoPE scaling. An implementation may overwrite query and key.
    """
    return _halves(query, cos, sin), _halves(key, cos, sin)


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Like `rope`, for the pairs (2i, 2i + 1), as in GPT-J and GLM."""
    return _neighbours(query, cos, sin), _neighbours(key, cos, sin)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rotated = (first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :])
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    first = x[..., 0 : 2 * half : 2]
    second = x[..., 1 : 2 * half : 2]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rope:
    """The implementations of the rotations on a device."""

    neox: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rope
    interleaved: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = interleaved_rope
