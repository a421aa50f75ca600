"""Builds the experts of a layer from a model's files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...engine.modelconfig import ModelConfig
from ...engine.moeconfig import MoeConfig
from ...kernels.ops.mlp import Experts, Gate, GatedMlp
from ...kernels.ops.moe import ExpertWeights, Routing
from .quant import Tensors
from .weights import StoredTensors, Weights


class ExpertNames(NamedTuple):
    """Names of the tensors of a mixture of experts. The names are below that of the layer (`mlp`), of the MLP, or of an
    expert (`gate`, `up` and `down`). The defaults are Qwen's names."""

    mlp: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = ""  # empty: the result of the shared expert is not multiplied
    correction: str = ""  # empty: the router has no correction


def routed_mlp(weights: Weights, config: ModelConfig, index: int, names: ExpertNames = ExpertNames()) -> Experts | None:
    """The experts of the layer `index`; None if its MLP is dense."""
    moe = config.moe
    if moe is None or not moe.layers[index]:
        return None
    name = f"model.layers.{index}.{names.mlp}"
    hidden = config.hidden_size
    shared = None
    shared_gate = None
    if moe.shared_size:
        shared = gated_mlp(weights, config, f"{name}.{names.shared}", moe.shared_size)
        if names.shared_gate:
            shared_gate = weights.linear([f"{name}.{names.shared_gate}"], [1], hidden, quantise=False)
    return Experts(
        router=weights.linear([f"{name}.{names.router}"], [moe.experts], hidden, quantise=False),
        routing=routing(moe),
        correction=weights.take(f"{name}.{names.correction}", (moe.experts,)).float() if names.correction else None,
        weights=_expert_weights(weights, config, moe, f"{name}.{names.experts}", names),
        shared=shared,
        shared_gate=shared_gate,
    )


def routing(moe: MoeConfig) -> Routing:
    """The arguments of the op moe.route."""
    return Routing(
        top_k=moe.top_k,
        score=moe.score,
        renormalise=moe.renormalise,
        scale=moe.scale,
        groups=moe.groups,
        top_groups=moe.top_groups,
        group_score=moe.group_score,
    )


def gate_of(config: ModelConfig) -> Gate:
    """The gated activation of the model's MLPs."""
    return "gelu_tanh_and_mul" if config.activation == "gelu_tanh" else "silu_and_mul"


def gated_mlp(
    weights: Weights, config: ModelConfig, name: str, inner: int, gate_up: Sequence[str] = ("gate_proj", "up_proj")
) -> GatedMlp:
    """A dense MLP. `gate_up`: the names of its first projections, or the name of one merged projection."""
    hidden = config.hidden_size
    sides = [2 * inner // len(gate_up)] * len(gate_up)
    return GatedMlp(
        gate_up=weights.linear([f"{name}.{projection}" for projection in gate_up], sides, hidden, config.mlp_bias),
        down=weights.linear([f"{name}.down_proj"], [hidden], inner, config.mlp_bias),
        gate=gate_of(config),
    )


def _expert_weights(
    weights: Weights, config: ModelConfig, moe: MoeConfig, name: str, names: ExpertNames
) -> ExpertWeights:
    hidden = config.hidden_size
    inner = moe.inner_size
    share = moe.top_k / moe.experts
    gate_up_source: Tensors = weights.tensors
    down_source: Tensors = weights.tensors
    gate_up_name = f"{name}.gate_up_proj"
    down_name = f"{name}.down_proj"
    if gate_up_name in weights.tensors:
        gate_up_source = StackedTensors(weights.tensors, gate_up_name, moe.experts, (names.gate, names.up))
        down_source = StackedTensors(weights.tensors, down_name, moe.experts, (names.down,))
    gate_up = [[f"{name}.{expert}.{names.gate}", f"{name}.{expert}.{names.up}"] for expert in range(moe.experts)]
    down = [[f"{name}.{expert}.{names.down}"] for expert in range(moe.experts)]
    first = weights.experts(gate_up_name, gate_up, inner, hidden, share, gate_up_source)
    second = weights.experts(down_name, down, hidden, inner, share, down_source)
    return ExpertWeights(
        op=first.op,
        gate_up=first.weight,
        down=second.weight,
        experts=moe.experts,
        inner=inner,
        gate=gate_of(config),
    )


class StackedTensors:
    """The weights of experts that are slices of one tensor [experts, out_features, in_features], as transformers 5 has
    them in memory, under the names that they have in older files: "….experts.3.up_proj.weight"."""

    def __init__(self, tensors: StoredTensors, name: str, experts: int, projections: Sequence[str]) -> None:
        """`name`: the tensor. `projections`: names of the projections that the outputs of an expert have, in order."""
        self._tensors = tensors
        self._name = name
        self._experts = experts
        self._projections = projections
        self._is_read = False

    def __contains__(self, name: str) -> bool:
        return self._place(name) is not None

    def dtype(self, name: str) -> str:
        return "" if self._place(name) is None else self._tensors.dtype(self._name)

    def shape(self, name: str) -> tuple[int, ...]:
        if self._place(name) is None:
            return (0,)
        _, out_features, in_features = self._tensors.shape(self._name)
        return out_features // len(self._projections), in_features

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        place = self._place(name)
        if place is None:
            return self._tensors.read(name, shape, dtypes)  # raises the error of a missing tensor
        expert, projection = place
        out_features, in_features = shape
        if self._is_read:
            self._tensors.mark_unread(self._name)
        self._is_read = True
        full = self._experts, len(self._projections) * out_features, in_features
        start = projection * out_features
        return self._tensors.read(self._name, full, dtypes)[expert, start : start + out_features]

    def _place(self, name: str) -> tuple[int, int] | None:
        """(expert, index of the projection) of a name; None if the stacked tensor does not have it."""
        *_, expert, projection, kind = name.rsplit(".", 3)
        if kind != "weight" or projection not in self._projections or not expert.isdecimal():
            return None
        return int(expert), self._projections.index(projection)
