"""Test cases of the ops of activation.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .case import Case, Make


def _inputs(shape: tuple[int, ...], scale: float = 1.0) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        return {"gate_up": (torch.randn(shape, generator=generator) * scale).to(dtype)}

    return make


CASES = [
    Case(f"activation.{op}", label, make)
    for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu_and_mul")
    for label, make in [
        ("plain", _inputs((5, 128))),
        ("one-row", _inputs((1, 2048))),
        ("odd-width", _inputs((3, 62))),
        ("no-rows", _inputs((0, 64))),
        ("saturated", _inputs((4, 64), scale=50.0)),
    ]
]
