"""Rotary position embedding (Su et al., 2021). It rotates pairs of dimensions: (i, i + half) in "neox", (2i, 2i + 1) in
"interleaved"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases.case import Case, Make


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + half) of every head, for i < half. Dimensions from 2 * half on stay unchanged.

    query [tokens, heads, dim], key [tokens, kv heads, dim]; cos and sin [tokens, half] float32 for each token's
    position, including RoPE scaling. An implementation may overwrite query and key.
    """
    return _halves(query, cos, sin), _halves(key, cos, sin)


def interleaved_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `rope`, for the pairs (2i, 2i + 1), as in GPT-J and GLM."""
    return _neighbours(query, cos, sin), _neighbours(key, cos, sin)


def by_section(cos: Tensor, sin: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Multimodal positions (Qwen2-VL, Wang et al., 2024): combine the tables of three kinds of positions into one.

    cos and sin [3 (time, height, width), tokens, half] -> [tokens, half], the arguments of any rotation. The first
    sizes[0] frequencies rotate by the time position, the next sizes[1] by the height, the last sizes[2] by the width.
    Raises ValueError if the sizes do not add up to half.
    """
    if len(sizes) != len(cos) or sum(sizes) != cos.shape[-1]:
        raise ValueError(
            f"rope: the sections {list(sizes)} must be {len(cos)} numbers with the sum {cos.shape[-1]} (rotary dim / 2)"
        )

    def pick(table: Tensor) -> Tensor:
        return torch.cat([row[..., part] for row, part in zip(table, parts, strict=True)], dim=-1)

    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return pick(cos), pick(sin)


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


def _inputs(tokens: int, heads: int, kv_heads: int, dim: int, rotary: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        angle = torch.rand(tokens, rotary // 2, generator=generator) * 100.0
        return {
            "query": torch.randn(tokens, heads, dim, generator=generator).to(dtype),
            "key": torch.randn(tokens, kv_heads, dim, generator=generator).to(dtype),
            "cos": angle.cos(),
            "sin": angle.sin(),
        }

    return make


def _sections(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    angle = torch.rand(3, 5, 16, generator=generator) * 100.0
    cos, sin = by_section(angle.cos(), angle.sin(), (4, 6, 6))
    return {**_inputs(5, 4, 2, 32, 32)(generator, dtype), "cos": cos, "sin": sin}


CASES = [
    Case(f"rope.{op}", label, make)
    for op in ("neox", "interleaved")
    for label, make in [
        ("plain", _inputs(7, 6, 2, 64, 64)),
        ("one-token", _inputs(1, 4, 4, 32, 32)),
        ("partial", _inputs(5, 4, 1, 48, 24)),
        ("odd-half", _inputs(3, 2, 1, 37, 22)),
        ("no-tokens", _inputs(0, 4, 2, 32, 32)),
        ("sections", _sections),
    ]
]
