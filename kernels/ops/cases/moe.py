"""Test cases of the ops of moe.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..linear import Fp8, Int4, Int8, Weight
from ..moe import ExpertGate, ExpertWeights, Routed, Routing
from .case import Case, Make
from .linear_mxfp4 import random_mxfp4


def _random_logits(
    tokens: int, experts: int, routing: Routing, correction: bool = False, ties: bool = False, mean: float = 0.0
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        logits = torch.randn(tokens, experts, generator=generator) + mean
        if ties:
            logits = logits.round()
        shift = torch.randn(experts, generator=generator) * 0.2 if correction else None
        return {"logits": logits, "routing": routing, "correction": shift}

    return make


def random_weight(
    op: str, out_features: int, in_features: int, generator: torch.Generator, dtype: torch.dtype, group: int = 32
) -> Weight:
    """A random weight of the format of the product `op`, for test inputs."""
    shape = out_features, in_features
    groups = -(-in_features // group)
    size: float = in_features**-0.5
    match op:
        case "int8":
            data = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
            return Int8(data, torch.rand(out_features, generator=generator) * size / 64.0)
        case "int4" | "int4_wide":
            data = torch.randint(0, 256, (out_features, -(-in_features // 2)), generator=generator).to(torch.uint8)
            if in_features % 2:
                data[:, -1] &= 15
            scale = (torch.rand(out_features, groups, generator=generator) * size / 4.0).half()
            zero = torch.randint(0, 17, (out_features, groups), generator=generator).to(torch.uint8)
            return Int4(data, scale, zero, group, in_features)
        case "fp8":
            values = (torch.randn(shape, generator=generator) * 100.0).clamp(-448.0, 448.0)
            scale = torch.rand(out_features, groups, generator=generator) * size / 100.0
            return Fp8(values.to(torch.float8_e4m3fn), scale, group)
        case "mxfp4":
            return random_mxfp4(out_features, in_features, generator)
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def random_experts(
    op: str,
    experts: int,
    hidden: int,
    inner: int,
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    gate: ExpertGate = "silu_and_mul",
    bias: bool = False,
    group: int = 32,
) -> ExpertWeights:
    """Random weights, not packed, for test inputs."""
    gate_up = random_weight(op, experts * 2 * inner, hidden, generator, dtype, group)
    down = random_weight(op, experts * hidden, inner, generator, dtype, group)
    weights = ExpertWeights(op, gate_up, down, experts, inner, gate)
    if not bias:
        return weights
    return weights._replace(
        gate_up_bias=torch.randn(experts, 2 * inner, generator=generator),
        down_bias=torch.randn(experts, hidden, generator=generator),
    )


def _inputs(
    op: str,
    tokens: int,
    experts: int = 8,
    top_k: int = 2,
    hidden: int = 64,
    inner: int = 32,
    only: int | None = None,  # the first choice of every token; other choices are the next experts
    used: int = 0,  # only the first `used` experts are chosen; 0: all of them
    **more: Any,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        weights = random_experts(op, experts, hidden, inner, generator, dtype, **more)
        chosen = torch.rand(tokens, used or experts, generator=generator).argsort(1)[:, :top_k]
        if only is not None:
            chosen = (torch.arange(top_k) + only).remainder(experts).expand(tokens, top_k)
        shares = torch.rand(tokens, top_k, generator=generator)
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        return {"x": x, "routed": Routed(chosen.int().contiguous(), shares), "weights": weights}

    return make


_PLAIN = Routing(2, "softmax", False)
_GROUPED = Routing(4, "sigmoid", True, scale=2.5, groups=4, top_groups=2, group_score="top2")
_FLOAT32 = {torch.float32: 1e-5}
# int8 rounds the gated activations, which differ by a rounding of x's dtype, to integers.
_ROUNDED = {torch.float32: 1e-2, torch.bfloat16: 4e-2, torch.float16: 2e-2}
_SUMMED = {torch.float32: 5e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
FORMATS = ("dense", "int8", "int4", "int4_wide", "fp8", "mxfp4")

CASES = [
    *(
        Case("moe.route", label, make, _FLOAT32)
        for label, make in [
            *((f"{tokens}-tokens", _random_logits(tokens, 8, _PLAIN)) for tokens in (0, 1, 3, 33)),
            ("128-experts", _random_logits(19, 128, Routing(8, "softmax", True))),
            ("512-experts", _random_logits(5, 512, Routing(10, "softmax", True))),
            ("odd-experts", _random_logits(5, 37, Routing(3, "softmax", False, scale=0.5))),
            ("all-experts", _random_logits(5, 6, Routing(6, "softmax", True))),
            ("one-expert", _random_logits(3, 1, Routing(1, "softmax", True))),
            ("top-1", _random_logits(7, 16, Routing(1, "sigmoid", False))),
            ("ties", _random_logits(33, 16, Routing(4, "softmax", True), ties=True)),
            ("equal-groups", _random_logits(33, 16, _GROUPED, ties=True)),
            ("sigmoid", _random_logits(5, 16, Routing(4, "sigmoid", True, scale=1.5))),
            ("small-sigmoids", _random_logits(5, 8, Routing(1, "sigmoid", True), mean=-60.0)),
            ("correction", _random_logits(33, 16, Routing(4, "sigmoid", True), correction=True)),
            ("softmax-correction", _random_logits(5, 16, Routing(4, "softmax", False), correction=True)),
            ("groups", _random_logits(33, 32, _GROUPED, correction=True)),
            ("odd-groups", _random_logits(33, 15, Routing(4, "sigmoid", True, 1.0, 3, 2, "top2"), correction=True)),
            ("softmax-groups", _random_logits(33, 32, Routing(4, "softmax", False, 16.0, 8, 3))),
            ("256-experts-in-groups", _random_logits(3, 256, Routing(8, "sigmoid", True, 2.5, 8, 4, "top2"), True)),
        ]
    ),
    *(
        Case("moe.experts", f"{op}-{label}", make, _ROUNDED if op in ("int8", "int4") else _SUMMED, packs=("weights",))
        for op in reversed(FORMATS)  # the self-test of a model includes the last case: one token and floats
        for label, make in [
            *((f"{tokens}-tokens", _inputs(op, tokens)) for tokens in (0, 1, 3, 33)),
            ("one-expert-of-all-tokens", _inputs(op, 40, top_k=1, only=5)),
            ("experts-without-tokens", _inputs(op, 17, experts=16, used=5)),
            ("all-experts", _inputs(op, 5, experts=4, top_k=4)),
            # MXFP4 needs multiples of 32 inputs.
            (
                "odd-shape",
                _inputs(op, 9, experts=3, hidden=96 if op == "mxfp4" else 37, inner=32 if op == "mxfp4" else 29),
            ),
            ("bias", _inputs(op, 6, bias=True)),
            ("clamped-bias", _inputs(op, 6, bias=True, gate="clamped_swiglu_and_mul")),
            ("gelu", _inputs(op, 3, gate="gelu_tanh_and_mul")),
            ("wide", _inputs(op, 70, experts=8, top_k=3, hidden=256, inner=192, group=64)),
            ("one-wide-token", _inputs(op, 1, experts=32, top_k=8, hidden=512, inner=192, group=64)),
        ]
    ),
]
