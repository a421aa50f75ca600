"""Test cases of the ops of linear_mxfp4.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..linear_mxfp4 import GROUP, Mxfp4
from .case import REAL_ROWS, REAL_WIDTHS, Case, Make


def random_mxfp4(out_features: int, in_features: int, generator: torch.Generator) -> Mxfp4:
    """A random weight for test inputs."""
    data = torch.randint(0, 256, (out_features, in_features // 2), generator=generator).to(torch.uint8)
    exponent = torch.randint(-3, 2, (out_features, in_features // GROUP), generator=generator)
    half = in_features.bit_length() // 2  # sums of products stay near 1
    return Mxfp4(data, (exponent + 125 - half).to(torch.uint8))


def _inputs(rows: int, in_features: int, out_features: int, bias: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        weight = random_mxfp4(out_features, in_features, generator)
        shift = torch.randn(out_features, generator=generator) if bias else None
        x = torch.randn(rows, in_features, generator=generator).to(dtype)
        return {"x": x, "weight": weight, "bias": shift, **more}

    return make


CASES = [
    Case("linear.mxfp4", label, make, packs=("weight",))
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 96, 49)),
        ("one-group", _inputs(3, 32, 29)),
        ("deep", _inputs(4, 3008, 33)),
        ("deep-40-rows", _inputs(40, 1120, 33)),
        ("bias", _inputs(5, 64, 50, bias=True)),
        ("head", _inputs(3, 64, 500, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case("linear.mxfp4", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths), packs=("weight",))
    for widths in REAL_WIDTHS
]
