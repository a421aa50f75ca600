"""The MLP of a decoder layer. It computes each token independently of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .moe import ExpertWeights, Routed, Routing
from .projection import Projection
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops

Gate = Literal["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]  # names of the fields of Activation


class Mlp(Protocol):
    """The MLP of a decoder layer. Kernels that fuse a layer support only some implementations, such as GatedMlp."""

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """x [tokens, hidden], normalised -> [tokens, hidden]."""
        ...


class GatedMlp(NamedTuple):
    """down(gate(gate_up(x)))."""

    gate_up: Projection  # hidden -> 2 * inner, gates first
    down: Projection  # inner -> hidden
    gate: Gate

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        gated = getattr(ops.activation, self.gate)(self.gate_up(x, ops, step))
        return self.down(gated, ops, step)


class Experts(NamedTuple):
    """A router and its experts. Some models add a shared expert, which computes every token."""

    router: Projection  # hidden -> experts
    routing: Routing
    correction: Tensor | None  # [experts] float32, as in moe.route
    weights: ExpertWeights
    shared: GatedMlp | None = None
    shared_gate: Projection | None = None  # hidden -> 1; the shared expert's result is multiplied by its sigmoid

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]. The second stream of the step computes the shared expert beside the
        routed experts."""
        routes_first = self.shared is None or step.streams.after_router
        return self.with_choices(x, self._route(x, ops, step) if routes_first else None, ops, step)

    def with_choices(self, x: Tensor, routed: Routed | None, ops: Ops, step: LayerStep) -> Tensor:
        """The result [tokens, hidden] of the routed and the shared experts for x [tokens, hidden]. `routed`: the
        experts of each token; None: the router computes them after the fork."""
        if self.shared is None:
            assert routed is not None
            alone: Tensor = ops.moe.experts(x, routed, self.weights)
            return alone
        with step.streams.fork():
            shared = self.shared_result(x, self.shared, ops, step)
        if routed is None:
            routed = self._route(x, ops, step)
        result: Tensor = ops.moe.experts(x, routed, self.weights)
        step.streams.join()
        return result + shared

    def _route(self, x: Tensor, ops: Ops, step: LayerStep) -> Routed:
        logits = self.router(x, ops, step, torch.promote_types(x.dtype, torch.float32))
        return ops.moe.route(logits, self.routing, self.correction)

    def shared_result(self, x: Tensor, shared: GatedMlp, ops: Ops, step: LayerStep) -> Tensor:
        """The result [tokens, hidden] of the shared expert, times its gate."""
        result = shared(x, ops, step)
        if self.shared_gate is None:
            return result
        return result * torch.sigmoid(self.shared_gate(x, ops, step))


class ScaledInputExperts(NamedTuple):
    """A router, experts whose inputs are multiplied by their scores, and a shared expert (Llama 4)."""

    router: Projection  # hidden -> experts
    routing: Routing
    weights: ExpertWeights
    shared: GatedMlp

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        logits = self.router(x, ops, step, torch.promote_types(x.dtype, torch.float32))
        chosen, scores = ops.moe.route(logits, self.routing, None)
        scaled = (x.unsqueeze(1) * scores.unsqueeze(2).to(x.dtype)).flatten(0, 1)
        routed = Routed(chosen.view(-1, 1), torch.ones_like(scores).view(-1, 1))  # each choice is a token of its own
        results: Tensor = ops.moe.experts(scaled, routed, self.weights)
        total: Tensor = results.unflatten(0, chosen.shape).sum(1) + self.shared(x, ops, step)
        return total
