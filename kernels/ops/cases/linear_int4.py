"""Test cases of the ops of linear_int4.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..linear_int4 import Int4
from .case import REAL_ROWS, REAL_WIDTHS, Case, Make


def _inputs(
    rows: int, in_features: int, out_features: int, group: int, bias: bool = False, zeros: bool = False, **more: Any
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        groups = -(-in_features // group)
        x = torch.randn(rows, in_features, generator=generator)
        if zeros:
            x[::2, : group // 2] = 0.0
            x[::3] = 0.0
        data = torch.randint(0, 256, (out_features, -(-in_features // 2)), generator=generator).to(torch.uint8)
        if in_features % 2:
            data[:, -1] &= 15
        scale = (torch.rand(out_features, groups, generator=generator) / (4.0 * in_features**0.5)).half()
        zero = torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8)
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x.to(dtype), "weight": Int4(data, scale, zero, group, in_features), "bias": shift, **more}

    return make


CASES = [
    Case(f"linear.{op}", label, make, packs=("weight",))
    for op in ("int4", "int4_wide")
    for label, make in [
        *((f"{rows}-rows", _inputs(rows, 128, 96, 64)) for rows in (0, 1, 4, 5, 31, 32, 33)),
        ("257-rows", _inputs(257, 70, 49, 32)),
        ("600-rows", _inputs(600, 70, 40, 32)),
        ("short-last-group", _inputs(3, 165, 29, 64)),
        ("one-group", _inputs(3, 37, 33, 64)),
        ("group-128", _inputs(5, 256, 40, 128)),
        ("deep", _inputs(4, 3072, 33, 64)),
        ("deep-40-rows", _inputs(40, 1100, 33, 64)),
        ("bias", _inputs(5, 96, 50, 32, bias=True)),
        ("zeros", _inputs(7, 128, 32, 64, zeros=True)),
        ("head", _inputs(3, 64, 500, 64, dtype=torch.float32)),
        ("head-40-rows", _inputs(40, 64, 500, 64, dtype=torch.float32)),
    ]
]

REAL_CASES = [
    Case(f"linear.{op}", f"{widths[0]}-to-{widths[1]}", _inputs(REAL_ROWS, *widths, 64), packs=("weight",))
    for op in ("int4", "int4_wide")
    for widths in REAL_WIDTHS
]
