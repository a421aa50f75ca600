"""Test cases of the ops of linear.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import linear_fp8, linear_int4, linear_int8, linear_mxfp4
from .case import REAL_ROWS, REAL_WIDTHS, Case, Make


def _product(rows: int, in_features: int, out_features: int, bias: bool = False, **more: Any) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        x = torch.randn(rows, in_features, generator=generator).to(dtype)
        weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
        shift = torch.randn(out_features, generator=generator) if bias else None
        return {"x": x, "weight": weight, "bias": shift, **more}

    return make


def _narrow(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
    """A product of float32 activations with a bfloat16 weight, as in a checkpoint that stores bfloat16."""
    inputs = _product(5, 64, 48)(generator, dtype)
    return {**inputs, "weight": inputs["weight"].to(torch.bfloat16)}


def _lookup(scale: float, stored: torch.dtype | None = None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        tokens = torch.randint(0, 50, (9,), generator=generator, dtype=torch.int32)
        weight = torch.randn(50, 33, generator=generator).to(stored or dtype)
        return {"tokens": tokens, "weight": weight, "scale": scale, "dtype": dtype if stored else None}

    return make


_WEIGHT = ("weight",)
_F32_BF16 = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

CASES = [
    *(Case("linear.dense", f"{rows}-rows", _product(rows, 64, 48), packs=_WEIGHT) for rows in (0, 1, 4, 5, 31, 32, 33)),
    Case("linear.dense", "257-rows", _product(257, 70, 49), packs=_WEIGHT),
    Case("linear.dense", "one-row-wide", _product(1, 384, 1024), packs=_WEIGHT),
    Case("linear.dense", "odd-shape", _product(3, 37, 29), packs=_WEIGHT),
    Case("linear.dense", "one-by-one", _product(2, 1, 1), packs=_WEIGHT),
    Case("linear.dense", "deep", _product(4, 3000, 33), packs=_WEIGHT),
    Case("linear.dense", "bias", _product(5, 64, 50, bias=True), packs=_WEIGHT),
    Case("linear.dense", "head", _product(3, 64, 500, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "head-of-many", _product(40, 64, 500, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "head-with-bias", _product(33, 72, 50, bias=True, dtype=torch.float32), packs=_WEIGHT),
    Case("linear.dense", "other-weight-type", _narrow, _F32_BF16, packs=_WEIGHT),
    Case("linear.embedding", "plain", _lookup(1.0)),
    Case("linear.embedding", "scaled", _lookup(32**0.5), _F32_BF16),
    Case("linear.embedding", "widened", _lookup(32**0.5, torch.bfloat16), _F32_BF16),
    *linear_int8.CASES,
    *linear_int4.CASES,
    *linear_fp8.CASES,
    *linear_mxfp4.CASES,
]

# Products of real models, for `localllm selftest`. The tests of all devices use the smaller CASES.
REAL_CASES = [
    *(
        Case("linear.dense", f"{widths[0]}-to-{widths[1]}", _product(REAL_ROWS, *widths), packs=_WEIGHT)
        for widths in REAL_WIDTHS
    ),
    *linear_int8.REAL_CASES,
    *linear_int4.REAL_CASES,
    *linear_fp8.REAL_CASES,
    *linear_mxfp4.REAL_CASES,
]
