"""Mixture of experts: a router chooses a few MLPs, the experts, for each token (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .activation import Activation
from .linear import Linear, Weight, map_tensors, weight_tensors
from .linear import pack_slices as pack_linear_slices

# Names of the fields of Activation that experts support.
ExpertGate = Literal["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu_and_mul"]


class Routing(NamedTuple):
    """The rules by which a router chooses experts, from config.json."""

    top_k: int  # experts per token
    score: Literal["softmax", "sigmoid"]
    renormalise: bool  # whether the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # factor of all weights
    groups: int = 1  # the experts are split into this many equal groups, in order
    top_groups: int = 1  # only experts of this many groups, those with the best scores, may be chosen
    group_score: Literal["max", "top2"] = (
        "max"  # the score of a group: its largest score, or the sum of its two largest
    )


class Routed(NamedTuple):
    """The chosen experts of each token."""

    experts: Tensor  # [tokens, top_k] int32, the best expert first; of equal scores, the smaller index first
    weights: Tensor  # [tokens, top_k] float32


class ExpertWeights(NamedTuple):
    """The weights of all experts of a layer. The outputs of expert e follow those of expert e - 1 in one weight."""

    op: str  # name of the field of linear.Linear whose format the weights have
    gate_up: Any  # experts * 2 * inner outputs, hidden inputs; of each expert gates first; packed by moe.pack_slices
    down: Any  # experts * hidden outputs, inner inputs; packed by moe.pack_slices
    experts: int
    inner: int
    gate: ExpertGate
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner] float32
    down_bias: Tensor | None = None  # [experts, hidden] float32


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Routed:
    """The chosen experts of tokens, from the router's logits [tokens, experts] float32.

    The score of an expert is the softmax or the sigmoid of its logit. `correction` [experts] float32 is added to the
    scores to choose groups and experts, not to the weights. Renormalised weights are divided by 1e-20 at least, so that
    their sum may be 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranks = _of_best_groups(ranks, routing)
    chosen = _best(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.renormalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    return Routed(chosen.int(), weights * routing.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """The indices [rows, count] of the largest scores; of equal scores the smaller index first, unlike torch.topk."""
    order: Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count]


def _of_best_groups(ranks: Tensor, routing: Routing) -> Tensor:
    """`ranks` [tokens, experts], with -inf for the experts that are not in the best groups."""
    grouped: Tensor = ranks.unflatten(1, (routing.groups, -1))
    largest = grouped.sort(dim=-1, descending=True).values
    group_scores = largest[..., : 2 if routing.group_score == "top2" else 1].sum(-1)
    best = _best(group_scores, routing.top_groups)
    is_best = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)


def experts(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The weighted sum of the results of each token's experts. x [tokens, hidden] -> [tokens, hidden], x's dtype.

    An expert computes down(gate(gate_up(x))): gate_up and the gate in x's dtype, down in float32 at least. The products
    round their inputs as the product `weights.op` of linear.py does. The sum is computed in float32 at least, in the
    order of `routed.experts`, and rounded once. Kernels may add in another order, and may round the results of experts
    to x's dtype.
    """
    tokens, top_k = routed.experts.shape
    if tokens * top_k <= weights.experts:
        results = _by_choice(x, routed, weights)
    else:
        results = _by_expert(x, routed, weights)
    total = torch.zeros_like(results[:, 0])
    for choice in range(top_k):
        total = total + routed.weights[:, choice, None].to(total.dtype) * results[:, choice]
    return total.to(x.dtype)


def _by_choice(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The results [tokens, top_k, hidden] of the chosen experts, from one product for each choice of a token."""
    wide = torch.promote_types(x.dtype, torch.float32)
    results = x.new_zeros(*routed.experts.shape, x.shape[1], dtype=wide)
    for token, choice in product(*map(range, routed.experts.shape)):
        select = _entry_of(routed.experts[token, choice, None])
        results[token, choice] = _expert(x[token, None], weights, select)[0]
    return results


def _entry_of(index: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that returns the entry `index` [1] of a tensor [experts, ...], as captures support it."""
    return lambda tensor: tensor.index_select(0, index)[0]


def _by_expert(x: Tensor, routed: Routed, weights: ExpertWeights) -> Tensor:
    """The results [tokens, top_k, hidden] of the chosen experts. Each expert computes all tokens, because a GPU graph
    cannot capture tensors whose size depends on the choice."""
    wide = torch.promote_types(x.dtype, torch.float32)
    results = x.new_zeros(*routed.experts.shape, x.shape[1], dtype=wide)
    for expert in range(weights.experts):
        result = _expert(x, weights, itemgetter(expert))
        is_chosen = (routed.experts == expert).unsqueeze(-1)
        results = torch.where(is_chosen, result.unsqueeze(1), results)
    return results


def _expert(x: Tensor, weights: ExpertWeights, select: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of one expert for x [rows, hidden] -> [rows, hidden], in float32 at least. `select` returns the entry
    of the expert in a tensor [experts, ...]."""
    multiply = getattr(Linear(), weights.op)
    gate_up_bias = None if weights.gate_up_bias is None else select(weights.gate_up_bias)
    down_bias = None if weights.down_bias is None else select(weights.down_bias)
    gate_up = multiply(x, _select(weights.gate_up, weights.experts, select), gate_up_bias)
    gated = getattr(Activation(), weights.gate)(gate_up)
    wide = torch.promote_types(x.dtype, torch.float32)
    result: Tensor = multiply(gated, _select(weights.down, weights.experts, select), down_bias, wide)
    return result


def _select(weight: Any, experts: int, select: Callable[[Tensor], Tensor]) -> Any:
    """The weight of one expert. `select` returns the expert's entry in a tensor [experts, ...]."""
    return map_tensors(weight, lambda tensor: select(tensor.unflatten(0, (experts, -1))))


def pack_slices(slices: Iterable[Weight], experts: int, out_features: int, dtype: torch.dtype) -> Any:
    """The weight of `experts` experts with `out_features` outputs each, packed for `experts` of this device.

    The arguments are those of linear.pack_slices. A slice has outputs of one expert only.
    """
    return pack_linear_slices(slices, experts * out_features, dtype)


@dataclass(frozen=True, slots=True)
class Moe:
    """The implementations of mixtures of experts on a device. `experts` takes weights packed by `pack_slices`, or plain
    weights."""

    route: Callable[..., Routed] = route
    experts: Callable[..., Tensor] = experts
    pack_slices: Callable[[Iterable[Weight], int, int, torch.dtype], Any] = pack_slices

    def pack(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
        """The packed form of the weights."""

        def packed(weight: Weight) -> Any:
            out_features = len(weight_tensors(weight)[0]) // weights.experts
            return self.pack_slices(_by_one_expert(weight, weights.experts), weights.experts, out_features, dtype)

        return weights._replace(gate_up=packed(weights.gate_up), down=packed(weights.down))


def _by_one_expert(weight: Weight, experts: int) -> Iterator[Weight]:
    """The weights of the experts, one after the other."""
    for expert in range(experts):
        yield _select(weight, experts, itemgetter(expert))
