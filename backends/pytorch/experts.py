"""Builds the experts of a layer from a model's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...engine.files.model_config import Activation, ModelConfig
from ...engine.files.moe_config import MoeConfig
from ...kernels.ops.mlp import Experts, Gate, GatedMlp
from ...kernels.ops.moe import ExpertGate, ExpertWeights, Routing
from ...kernels.ops.projection import Product
from .quant import Tensors
from .weights import StoredTensors, Weights


class MlpNames(NamedTuple):
    """The names of the projections of a dense MLP."""

    gate_up: Sequence[str] = ("gate_proj", "up_proj")  # or the name of one merged projection
    down: str = "down_proj"


MERGED = MlpNames(("gate_up_proj",))


class ExpertLayout(NamedTuple):
    """The tensors of a mixture of experts in a model's files. The names are below that of the layer (`mlp`, `shared`),
    of the MLP, or of an expert (`gate`, `up` and `down`). The defaults are those of Qwen."""

    mlp: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_names: MlpNames = MlpNames()
    shared_gate: str = ""  # empty: the result of the shared expert is not multiplied
    correction: str = ""  # empty: the router has no correction
    biases: bool = False  # whether the router and all experts have biases
    transposed: bool = False  # whether a tensor of all experts is [experts, in_features, out_features]
    ordered_by_shape: bool = False  # whether the shape of a tensor of all experts decides if it is transposed
    alternating: bool = False  # whether gates and ups alternate in a tensor of all experts; else gates are first


def routed_mlp(
    weights: Weights,
    config: ModelConfig,
    index: int,
    layout: ExpertLayout = ExpertLayout(),
    gate: ExpertGate | None = None,
) -> Experts | None:
    """The experts of the layer `index`; None if its MLP is dense. `gate`: the activation of the experts; None: that of
    the model."""
    moe = config.moe
    if moe is None or not moe.layers[index]:
        return None
    name = f"model.layers.{index}.{layout.mlp}"
    hidden = config.hidden_size
    shared = None
    shared_gate = None
    if moe.shared_size:
        path = f"model.layers.{index}.{layout.shared}"
        shared = gated_mlp(weights, config, path, moe.shared_size, layout.shared_names)
        if layout.shared_gate:
            shared_gate = weights.linear([f"{name}.{layout.shared_gate}"], [1], hidden, quantise=False)
    correction = None
    if layout.correction:
        correction = _correction(weights, f"{name}.{layout.correction}", moe.experts)
    experts = Experts(
        router=weights.linear([f"{name}.{layout.router}"], [moe.experts], hidden, layout.biases, quantise=False),
        routing=routing(moe),
        correction=correction,
        weights=expert_weights(weights, hidden, moe, f"{name}.experts", layout, gate or gate_of(config)),
        shared=shared,
        shared_gate=shared_gate,
    )
    if shared is not None:
        weights.shared_experts.append(experts)
    return experts


def _correction(weights: Weights, name: str, experts: int) -> Tensor:
    """The correction of a router [experts] float32. ERNIE stores [1, experts]."""
    shape = (1, experts) if len(weights.tensors.shape(name)) == 2 else (experts,)
    return weights.take(name, shape).float().flatten()


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


_GATES: Mapping[Activation, Gate] = MappingProxyType(
    {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
)


def gate_of(config: ModelConfig) -> Gate:
    """The gated activation of the model's MLPs."""
    return _GATES[config.activation]


def gated_mlp(weights: Weights, config: ModelConfig, name: str, inner: int, names: MlpNames = MlpNames()) -> GatedMlp:
    """A dense MLP with gates."""
    hidden = config.hidden_size
    gate_up = [f"{name}.{projection}" for projection in names.gate_up]
    return GatedMlp(
        gate_up=weights.linear(gate_up, [2 * inner // len(gate_up)] * len(gate_up), hidden, config.mlp_bias),
        down=weights.linear([f"{name}.{names.down}"], [hidden], inner, config.mlp_bias),
        gate=gate_of(config),
    )


def expert_weights(
    weights: Weights, hidden: int, moe: MoeConfig, name: str, layout: ExpertLayout, gate: ExpertGate
) -> ExpertWeights:
    """The weights of all experts of a layer, without router. `name`: of the experts."""
    inner = moe.inner_size
    gate_up = _projection(weights, f"{name}.gate_up_proj", moe, (layout.gate, layout.up), inner, hidden, layout)
    down = _projection(weights, f"{name}.down_proj", moe, (layout.down,), hidden, inner, layout)
    gate_up_bias = None
    down_bias = None
    if layout.biases:
        gate_up_bias = weights.take(f"{name}.gate_up_proj_bias", (moe.experts, 2 * inner)).float()
        down_bias = weights.take(f"{name}.down_proj_bias", (moe.experts, hidden)).float()
        if layout.alternating:
            gate_up_bias = torch.cat([gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]], dim=1)
    return ExpertWeights(
        op=gate_up.op,
        gate_up=gate_up.weight,
        down=down.weight,
        experts=moe.experts,
        inner=inner,
        gate=gate,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _projection(
    weights: Weights,
    stacked: str,
    moe: MoeConfig,
    projections: Sequence[str],
    out_features: int,
    in_features: int,
    layout: ExpertLayout,
) -> Product:
    """The projections of all experts with these names, as one weight; from the tensor `stacked` if it exists."""
    source: Tensors = weights.tensors
    if StackedTensors.exists(weights.tensors, stacked):
        if layout.ordered_by_shape:
            plain = moe.experts, out_features * len(projections), in_features
            layout = layout._replace(transposed=weights.tensors.shape(stacked) != plain)
        source = StackedTensors(weights.tensors, stacked, moe.experts, projections, layout)
    experts = stacked.rpartition(".")[0]
    names = [[f"{experts}.{expert}.{projection}" for projection in projections] for expert in range(moe.experts)]
    return weights.experts(stacked, names, out_features, in_features, moe.top_k / moe.experts, source)


class StackedTensors:
    """The weights of experts that are slices of one tensor of all experts, under the names that they have in older
    files: "….experts.3.up_proj.weight". transformers 5 has [experts, out_features, in_features] in memory."""

    # The end of a tensor's name in older files -> the end of the name of the tensor of all experts.
    ENDS: ClassVar[Mapping[str, str]] = MappingProxyType({"weight": "", "blocks": "_blocks", "scales": "_scales"})

    def __init__(
        self, tensors: StoredTensors, name: str, experts: int, projections: Sequence[str], layout: ExpertLayout
    ) -> None:
        """`name`: the tensor. `projections`: names of the projections that the outputs of an expert have, in order."""
        self._tensors = tensors
        self._name = name
        self._experts = experts
        self._projections = projections
        self._layout = layout
        self._headers: dict[str, tuple[str, tuple[int, ...]]] = {}  # name of a tensor -> its dtype and its shape
        self._visited: set[str] = set()  # names of the tensors that were read
        for end in self.ENDS.values():
            if f"{name}{end}" in tensors:
                self._headers[f"{name}{end}"] = tensors.dtype(f"{name}{end}"), tensors.shape(f"{name}{end}")

    @classmethod
    def exists(cls, tensors: StoredTensors, name: str) -> bool:
        """Whether the files have a tensor of all experts."""
        return any(f"{name}{end}" in tensors for end in cls.ENDS.values())

    def __contains__(self, name: str) -> bool:
        return bool(self.dtype(name))

    def dtype(self, name: str) -> str:
        place = self._place(name)
        return "" if place is None else self._headers[place.stacked][0]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        if place is None:
            return (0,)
        _, *sizes = self._headers[place.stacked][1]
        out_features, *rest = reversed(sizes) if self._is_transposed(place) else sizes
        return out_features // len(self._projections), *rest

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        place = self._place(name)
        if place is None:
            return self._tensors.read(f"{self._name}{self.ENDS.get(name.rpartition('.')[2], '')}", shape, dtypes)
        if place.stacked in self._visited:
            self._tensors.mark_unread(place.stacked)
        self._visited.add(place.stacked)
        count = len(self._projections)
        out_features, *rest = shape
        full = [count * out_features, *rest]
        if self._is_transposed(place):
            one = self._tensors.read(place.stacked, (self._experts, *reversed(full)), dtypes)[place.expert].t()
        else:
            one = self._tensors.read(place.stacked, (self._experts, *full), dtypes)[place.expert]
        if self._layout.alternating:
            return one[place.projection :: count]
        return one[place.projection * out_features : (place.projection + 1) * out_features]

    def _is_transposed(self, place: _Place) -> bool:
        """Whether the tensor is [experts, in_features, out_features]. Quantised tensors never are."""
        return self._layout.transposed and place.stacked == self._name

    def _place(self, name: str) -> _Place | None:
        """The place of a tensor; None if the tensor of all experts does not have it."""
        *_, expert, projection, end = name.rsplit(".", 3)
        stacked = f"{self._name}{self.ENDS.get(end, end)}"
        if stacked not in self._headers or projection not in self._projections or not expert.isdecimal():
            return None
        return _Place(stacked, int(expert), self._projections.index(projection))


class _Place(NamedTuple):
    """The place of a projection of an expert in a tensor of all experts."""

    stacked: str
    expert: int
    projection: int  # index
