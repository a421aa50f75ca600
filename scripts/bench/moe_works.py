"""Benchmarks of mixtures of experts in every weight format. Reads of the chosen experts' weights bound few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from linear_works import OPS, random_weight
from torch import Tensor
from torch.nn import functional as F
from work import Work

from localllm.kernels.ops.moe import ExpertWeights, Routed, Routing, route


class Model(NamedTuple):
    """The sizes of the experts of a layer."""

    experts: int
    top_k: int  # experts per token
    hidden: int
    inner: int


def works(formats: Sequence[str], tokens: Sequence[int], model: Model, dtype: torch.dtype) -> Iterator[Work]:
    """A `Work` of the router for each number of tokens, and of the experts for each format and number of tokens.

    `dtype`: dtype of the activations.
    """
    routing = Routing(model.top_k, "softmax", True)
    for count in tokens:
        yield Work(
            op="moe.route",
            label=f"{count} × {model.experts}, top {model.top_k}",
            make=partial(_logits, count, model.experts, routing),
            bytes=4.0 * count * (model.experts + 2 * model.top_k),
            reference=_route,
        )
    for fmt in formats:
        op, width, with_f32, with_bf16 = OPS[fmt]
        per_expert = 3 * model.hidden * model.inner
        for count in tokens:
            routed = _routed(count, model)
            yield Work(
                op="moe.experts",
                label=f"{fmt}, {count} × {model.experts} experts, top {model.top_k}, {model.hidden} × {model.inner}",
                make=partial(_arguments, op, fmt, routed, model, dtype),
                bytes=width * per_expert * len(routed.experts.unique()) + 2.0 * dtype.itemsize * count * model.hidden,
                reference=_experts,
                operations=2.0 * count * model.top_k * per_expert,
                kinds=with_bf16 if dtype == torch.bfloat16 else with_f32,
                packs=("weights",),
                dtype=dtype,
            )


def _routed(tokens: int, model: Model) -> Routed:
    logits = torch.randn(tokens, model.experts, generator=torch.Generator().manual_seed(tokens))
    return route(logits, Routing(model.top_k, "softmax", True))


def _logits(tokens: int, experts: int, routing: Routing) -> Mapping[str, Any]:
    return {"logits": torch.randn(tokens, experts), "routing": routing}


def _arguments(op: str, fmt: str, routed: Routed, model: Model, dtype: torch.dtype) -> Mapping[str, Any]:
    gate_up = random_weight(fmt, model.hidden, 2 * model.experts * model.inner)
    down = random_weight(fmt, model.inner, model.experts * model.hidden)
    weights = ExpertWeights(op, gate_up, down, model.experts, model.inner, "silu_and_mul")
    return {"x": torch.randn(len(routed.experts), model.hidden).to(dtype), "routed": routed, "weights": weights}


def _route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1).topk(routing.top_k)
    return experts, weights / weights.sum(-1, keepdim=True)


def _experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """A loop of torch's linear over the chosen experts, with unquantised weights of the same shape."""
    gate_up, down = _plain(weights.experts, weights.inner, x.shape[1], x.dtype)
    total = torch.zeros_like(x)
    for expert in routed.experts.unique().tolist():
        tokens, choices = (routed.experts == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, down[expert])
        total.index_add_(0, tokens, result * routed.weights[tokens, choices, None].to(x.dtype))
    return total


@lru_cache(maxsize=1)
def _plain(experts: int, inner: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden).to(dtype)
    return gate_up, torch.randn(experts, hidden, inner).to(dtype)
