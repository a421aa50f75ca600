"""Parts of the layers of Gemma 4: a norm of values, experts beside a dense MLP, and an input of its own for a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .mlp import GatedMlp
from .moe import ExpertWeights, Routed, Routing
from .projection import Projection
from .step import HeadStep, LayerStep

if TYPE_CHECKING:
    from . import Ops


class NormedValues(NamedTuple):
    """The input projection of attention whose values are normalised without a weight."""

    projection: Projection  # hidden -> queries, keys and values; with `keys_are_values` without values
    kv_heads: int
    unit: Tensor  # [dim] ones
    keys_are_values: bool  # whether the values are the keys before their norm
    eps: float

    @property
    def product(self) -> None:
        return None

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        outputs = self.projection(x, ops, step, dtype)
        width = self.kv_heads * len(self.unit)
        inputs = outputs if self.keys_are_values else outputs[:, :-width]
        values = outputs[:, -width:].contiguous().view(len(outputs), self.kv_heads, -1)
        return torch.cat((inputs, ops.norm.rms(values, self.unit, self.eps, 0.0).flatten(1)), dim=1)


class DenseAndExperts(NamedTuple):
    """norm(dense(norm(x))) + norm(experts(norm(x))), for the residual stream x. The router has a norm of its own."""

    dense: GatedMlp
    router: Projection
    routing: Routing
    expert_scales: Tensor  # [experts] float32, factors of the weights of chosen experts
    weights: ExpertWeights
    before_dense: Tensor  # the weights of the norms, each [hidden]
    before_router: Tensor
    before_experts: Tensor
    after_dense: Tensor
    after_experts: Tensor
    eps: float

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        dense = self.dense(self._norm(ops, x, self.before_dense), ops, step)
        logits = self.router(
            self._norm(ops, x, self.before_router), ops, step, torch.promote_types(x.dtype, torch.float32)
        )
        chosen, weights = ops.moe.route(logits, self.routing, None)
        routed = Routed(chosen, weights * self.expert_scales[chosen.long()])
        result = ops.moe.experts(self._norm(ops, x, self.before_experts), routed, self.weights)
        return self._norm(ops, dense, self.after_dense) + self._norm(ops, result, self.after_experts)

    def _norm(self, ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = ops.norm.rms(x, weight, self.eps, 0.0)
        return result


class LayerInput(NamedTuple):
    """The end of a layer: adds norm(projection(gate(x) * input)) to the stream, and multiplies the stream."""

    layer: int  # index in LayerStep.layer_inputs
    gate: Projection | None  # hidden -> dim; None: the layer has no input
    activation: str  # name of the field of Activation of gate and input
    projection: Projection | None  # dim -> hidden
    norm: Tensor | None  # [hidden]
    scale: Tensor  # [1], factor of the stream
    eps: float

    def __call__(self, x: Tensor, stream: Tensor, ops: Ops, step: LayerStep) -> tuple[Tensor, Tensor]:
        stream = x + stream
        if self.gate is None or self.projection is None:
            stream = stream * self.scale
            return torch.zeros_like(stream), stream
        assert step.layer_inputs is not None
        gates = self.gate(stream, ops, step)
        gated = getattr(ops.activation, self.activation)(torch.cat((gates, step.layer_inputs[self.layer]), dim=1))
        added = ops.norm.rms(self.projection(gated, ops, step), self.norm, self.eps, 0.0)
        return added * self.scale, stream * self.scale
