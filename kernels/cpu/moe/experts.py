"""Mixtures of experts (moe*.cpp); kernels/ops/moe.py defines them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from ...ops import moe as reference
from ...ops.activation import Activation
from ...ops.linear import PANEL, Linear, Weight, map_tensors, weight_tensors
from ...ops.mlp import Experts, Mlp
from ...ops.moe import ExpertGate, ExpertWeights, Routed, Routing
from ..products import linear
from ..products.linear import Packed

_route = torch.ops.localllm.route.default
_experts = torch.ops.localllm.experts.default
_routed_experts = torch.ops.localllm.routed_experts.default

_SCORES = ("softmax", "sigmoid")  # values of the enumeration RouterScore in kernels.h
_GATES = get_args(ExpertGate)  # values of the enumeration ExpertGate in experts.h

_PRODUCTS = Linear(
    dense=linear.dense,
    int8=linear.int8,
    int4=linear.int4,
    int4_wide=linear.int4_wide,
    fp8=linear.fp8,
    mxfp4=linear.mxfp4,
)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    if logits.dtype != torch.float32:
        return reference.route(logits, routing, correction)
    experts = logits.new_empty(logits.shape[0], routing.top_k, dtype=torch.int32)
    weights = logits.new_empty(logits.shape[0], routing.top_k)
    _route(experts, weights, logits, correction, *_routing_arguments(routing))
    return Routed(experts, weights)


def _routing_arguments(routing: Routing) -> tuple[int, bool, float, int, int, bool]:
    score = _SCORES.index(routing.score)
    groups = routing.groups, routing.top_groups, routing.group_score == "top2"
    return score, routing.renormalise, float(routing.scale), *groups


def experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    if not (isinstance(weights.gate_up, Packed) and isinstance(weights.down, Packed)):
        return reference.experts(x, routed, weights)
    if not _have_kernel(weights):
        return _composed(x, routed, weights)
    out = x.new_empty(x.shape)
    _experts(out, x, routed.experts, routed.weights, *_stacked(weights))
    return out


def _have_kernel(weights: ExpertWeights) -> bool:
    """True if one kernel computes all experts, whose weights are packed."""
    hidden = weights.gate_up.in_features
    one_format: bool = weights.gate_up.format == weights.down.format
    return one_format and hidden % PANEL == 0 and weights.inner % PANEL == 0


def _stacked(weights: ExpertWeights) -> Stacked:
    gate_up = weights.gate_up
    down = weights.down
    stacks = gate_up.data, down.data, weights.gate_up_bias, weights.down_bias
    sizes = weights.experts, weights.inner, _GATES.index(weights.gate)
    return Stacked(*stacks, gate_up.format, gate_up.group, down.group, weights.op == "int4_wide", *sizes)


class Router(NamedTuple):
    """The arguments of the op `routed_experts` that describe the router, in its order."""

    weight: Tensor
    bias: Tensor | None
    format: int
    group: int
    correction: Tensor | None
    routing: tuple[int, bool, float, int, int, bool]  # score, renormalise, scale, groups, top_groups, top2
    top_k: int


class Stacked(NamedTuple):
    """The arguments of the ops `experts` and `routed_experts` that describe the experts, in their order."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    format: int
    gate_up_group: int
    down_group: int
    wide: bool
    experts: int
    inner: int
    gate: int


class Prepared(NamedTuple):
    """A router and its experts, which one op computes."""

    router: Router
    experts: Stacked


def prepare(mlp: Mlp) -> Prepared | None:
    """The router and the experts for `routed_experts`; None if no op computes them together."""
    product = mlp.router.product if isinstance(mlp, Experts) else None
    if product is None or product.op != "dense" or product.order is not None:
        return None
    assert isinstance(mlp, Experts)
    weights = mlp.weights
    router = product.weight
    if not all(isinstance(weight, Packed) for weight in (router, weights.gate_up, weights.down)):
        return None
    if not _have_kernel(weights):
        return None
    bias = None if product.bias is None else product.bias.float()
    routing = _routing_arguments(mlp.routing)
    arguments = router.data, bias, router.format, router.group, mlp.correction, routing, mlp.routing.top_k
    return Prepared(Router(*arguments), _stacked(weights))


def routed_experts(x: Tensor, prepared: Prepared) -> Tensor:
    """The output of the experts that the router chooses for each token of x [tokens, hidden]."""
    out = x.new_empty(x.shape)
    *router, routing, top_k = prepared.router
    _routed_experts(out, x, *router, *routing, top_k, *prepared.experts)
    return out


def pack_slices(slices: Iterable[Weight], experts: int, out_features: int, dtype: torch.dtype) -> Any:
    """See kernels/ops/moe.py. Each expert begins at a panel; its last panel is padded with zeros."""
    slices = iter(slices)
    first = next(slices)
    slices = chain([first], slices)
    if linear.layout_of(first) is None:
        return reference.pack_slices(slices, experts, out_features, dtype)
    return linear.pack_slices(_full_panels(slices, out_features), experts * _padded(out_features), dtype)


def _padded(out_features: int) -> int:
    return -(-out_features // PANEL) * PANEL


def _full_panels(slices: Iterable[Weight], out_features: int) -> Iterator[Weight]:
    """The slices, with those of an expert joined if one of them ends within a panel that another one continues."""
    pending: list[Weight] = []
    end = 0  # outputs of the current expert so far
    for weight in slices:
        end += len(weight_tensors(weight)[0])
        is_last = end == out_features
        if not pending and (is_last or end % PANEL == 0):
            yield weight
        else:  # a copy, because the slice may become invalid with the next one
            pending.append(map_tensors(weight, Tensor.clone))
        if is_last:
            if pending:
                yield _joined(pending)
            pending = []
            end = 0


def _joined(weights: list[Weight]) -> Weight:
    """One weight with the outputs of all `weights`."""
    columns = [weight_tensors(weight) for weight in weights]
    joined = iter([torch.cat(parts) for parts in zip(*columns, strict=True)])
    result: Weight = map_tensors(weights[0], lambda _: next(joined))
    return result


def _composed(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The experts one after the other, for sizes that are not multiples of PANEL."""
    multiply = getattr(_PRODUCTS, weights.op)
    gate = getattr(Activation(), weights.gate)
    results = x.new_zeros(*routed.experts.shape, x.shape[1], dtype=torch.float32)
    for expert in range(weights.experts):
        rows, choices = (routed.experts == expert).nonzero(as_tuple=True)
        gate_up_bias = None if weights.gate_up_bias is None else weights.gate_up_bias[expert]
        down_bias = None if weights.down_bias is None else weights.down_bias[expert]
        gated = gate(multiply(x[rows], _of_expert(weights.gate_up, expert, 2 * weights.inner), gate_up_bias))
        down = _of_expert(weights.down, expert, x.shape[1])
        results[rows, choices] = multiply(gated, down, down_bias, torch.float32)
    return (results * routed.weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _of_expert(weight: Packed, expert: int, out_features: int) -> Packed:
    size = len(weight.data) // (weight.out_features // _padded(out_features))
    return weight._replace(data=weight.data[expert * size : (expert + 1) * size], out_features=out_features)
