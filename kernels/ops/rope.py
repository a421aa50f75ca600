"""Rotary position embedding (Su et al., 2021), the halves-apart ("neox") layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .case import Case


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first 2 * rotary / 2 dimensions of every head; the rest passes through (partial rotary).

    query [tokens, heads, dim], key [tokens, kv heads, dim]; cos and sin [tokens, rotary / 2], float32, are the rows
    of the positions, scaling included. An implementation may write over query and key.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = (first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :])
    return torch.cat(turned, dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Rope:
    """Which implementation of the rotation a device uses."""

    neox: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rope


def _inputs(tokens: int, heads: int, kv_heads: int, dim: int, rotary: int):
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        angle = torch.rand(tokens, rotary // 2, generator=generator) * 100.0
        return {
            "query": torch.randn(tokens, heads, dim, generator=generator).to(dtype),
            "key": torch.randn(tokens, kv_heads, dim, generator=generator).to(dtype),
            "cos": angle.cos(),
            "sin": angle.sin(),
        }

    return make


CASES = [
    Case("rope.neox", "plain", _inputs(7, 6, 2, 64, 64)),
    Case("rope.neox", "one-token", _inputs(1, 4, 4, 32, 32)),
    Case("rope.neox", "partial", _inputs(5, 4, 1, 48, 24)),
    Case("rope.neox", "no-tokens", _inputs(0, 4, 2, 32, 32)),
]
