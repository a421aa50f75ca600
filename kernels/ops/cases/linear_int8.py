"""Test cases of the ops of linear_int8.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..linear_int8 import Int8
from .case import REAL_ROWS, REAL_WIDTHS, Case, Make


def _inputs(
    rows: int, in_features: int, out_features: int, bias: bool = False, zeros: bool = False, **more: Any
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, in_features, generator=generator)
        if zeros:
            x[::2] = 0.0
        data = torch.randint(-127, 128, (out_features, in_features), generator=generator).to(torch.int8)
        weight = Int8(data, torch.rand(out_features, generator=generator) / (64.0 * in_features**0.5))
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x.to(dtype), "weight": weight, "bias": shift, **more}

    return make


CASES = [
    Case("linear.int8", label, make, packs=("weight",))
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 70, 49)),
        ("600-rows", _inputs(600, 70, 40)),
        ("odd-shape", _inputs(3, 37, 29)),
        ("one-by-one", _inputs(2, 1, 1)),
        ("deep", _inputs(4, 3000, 33)),
        ("deep-40-rows", _inputs(40, 1100, 33)),
        ("bias", _inputs(5, 65, 50, bias=True)),
        ("zeros", _inputs(5, 64, 32, zeros=True)),
        ("head", _inputs(3, 64, 500, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case("linear.int8", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths), packs=("weight",))
    for widths in REAL_WIDTHS
]
