"""Test cases of the ops of rope.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .case import Case, Make


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


CASES = [
    Case(f"rope.{op}", label, make)
    for op in ("neox", "interleaved")
    for label, make in [
        ("plain", _inputs(7, 6, 2, 64, 64)),
        ("one-token", _inputs(1, 4, 4, 32, 32)),
        ("partial", _inputs(5, 4, 1, 48, 24)),
        ("odd-half", _inputs(3, 2, 1, 37, 22)),
        ("no-tokens", _inputs(0, 4, 2, 32, 32)),
    ]
]
