"""Test cases of the ops of linear_fp8.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..linear_fp8 import Fp8
from .case import REAL_ROWS, REAL_WIDTHS, Case, Make


def _inputs(rows: int, in_features: int, out_features: int, group: int, bias: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        data = (torch.randn(out_features, in_features, generator=generator) * 100.0).clamp(-448.0, 448.0)
        data[:, ::7] /= 2.0**14  # becomes subnormal
        scale = torch.rand(out_features, -(-in_features // group), generator=generator) / (100.0 * in_features**0.5)
        shift = torch.randn(out_features, generator=generator) if bias else None
        x = torch.randn(rows, in_features, generator=generator).to(dtype)
        return {"x": x, "weight": Fp8(data.to(torch.float8_e4m3fn), scale, group), "bias": shift, **more}

    return make


CASES = [
    Case("linear.fp8", label, make, packs=("weight",))
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96, 128)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 70, 49, 70)),
        ("odd-shape", _inputs(3, 37, 29, 37)),
        ("one-by-one", _inputs(2, 1, 1, 1)),
        ("blocks", _inputs(4, 384, 33, 128)),
        ("short-last-block", _inputs(4, 300, 33, 128)),
        ("deep", _inputs(4, 3000, 33, 3000)),
        ("deep-40-rows", _inputs(40, 1100, 33, 128)),
        ("bias", _inputs(5, 64, 50, 64, bias=True)),
        ("head", _inputs(3, 64, 500, 64, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, 64, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case("linear.fp8", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths, 128), packs=("weight",))
    for widths in REAL_WIDTHS
]
