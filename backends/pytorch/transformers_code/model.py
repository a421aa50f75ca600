"""A model that transformers' code computes: its modules with our weights, over our cache."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from ....kernels.ops import Ops
from ....kernels.ops.mlp import GatedMlp
from ....kernels.ops.moe import ExpertWeights
from ....kernels.ops.norm import rms_norm
from ....kernels.ops.step import Adapters
from ..experts import ExpertLayout, StackedTensors
from ..inputs import Step
from ..kv import GroupedKV
from ..weights import Weights
from .attention import NAME, PLACE, Current, Place
from .classes import skeleton
from .describe import Description, name_of
from .modules import GATES, Embedding, Experts, Linear, Mlp, Norm, Product, has_our_experts

_MLP = ("gate_proj", "up_proj", "down_proj")
ROUTERS = ("gate", "router")  # names of linear layers that are never quantised while loading


@dataclass
class _Output(ModelOutput):
    """The fields that the classes in transformers read from the result of their layers."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class _Hidden(nn.Module):
    """Stands for the layers of a model: returns hidden states that are already computed."""

    def __init__(self, current: Current) -> None:
        super().__init__()
        self._current = current

    @property
    def decoder(self) -> _Hidden:
        """The layers, for classes that call a part of their base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self._current.hidden)


class TransformersModel:
    """See runner.Model."""

    def __init__(self, module: Any, current: Current) -> None:
        self._current = current
        self._layers = module.base_model
        # The output head of the class, with all its factors and caps, behind hidden states of ours.
        self._head = copy(module)
        self._head._modules = {**module._modules, module.base_model_prefix: _Hidden(current)}

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> Tensor:
        self._current.begin(step, ops, kv)
        tokens, positions = step.tokens.unsqueeze(0), step.positions.unsqueeze(0)
        output = self._layers(input_ids=tokens, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        is_decode = step.last.shape[0] == len(step.rows.query_lens) == hidden.shape[0]
        return hidden if is_decode else hidden.index_select(0, step.last)

    def logits(self, hidden: Tensor, ops: Ops, adapters: Adapters | None = None) -> Tensor:
        self._current.begin_head(hidden.unsqueeze(0), ops, adapters)
        logits: Tensor = self._head(input_ids=None, use_cache=False).logits
        return logits[0].float()

    def set_context(self, context: int) -> None:
        """Nothing depends on the maximum context: transformers' code computes rotations in each step."""


def build(description: Description, weights: Weights) -> TransformersModel:
    """The model with the weights of its files. Raises ModelRefused."""
    model = skeleton(description.config, NAME)
    current = Current()
    builder = _Builder(model, description, weights, current)
    for name, module in list(model.named_modules()):
        builder.replace(name, module)
    builder.fill()
    for index, attending in enumerate(description.calls.attention):
        place = Place(current, index, attending.call)
        object.__setattr__(model.get_submodule(attending.name), PLACE, place)
    return TransformersModel(model, current)


class _Builder:
    def __init__(self, model: Any, description: Description, weights: Weights, current: Current) -> None:
        self._model = model
        self._description = description
        self._weights = weights
        self._current = current
        self._like = torch.empty(0, dtype=weights.dtype, device=weights.device)
        self._head = description.head
        self._embedding = name_of(model, model.get_input_embeddings())
        self._replaced: list[str] = []
        self._siblings = description.calls.siblings()
        self._products: dict[str, tuple[Product, int]] = {}  # name of a linear layer -> its product and index
        self._fused = description.fused

    def replace(self, name: str, module: Any) -> None:
        """Put our module in the place of one of transformers, if we have one."""
        if self._is_replaced(f"{name}."):
            return
        ours: nn.Module | None = None
        if type(module) is nn.Linear and self._description.calls.linear[name]:
            ours = self._linear(name, module)
        elif isinstance(module, nn.Embedding) and name == self._embedding:
            ours = self._token_embedding(name, module)
        elif has_our_experts(module):
            ours = self._experts(name, module)
        elif self._fused and self._is_gated(name, module):
            ours = self._mlp(name, module)
        elif self._fused and (offset := norm_offset(module)) is not None:
            weight = self._take(f"{name}.weight", module.weight.shape)
            ours = Norm(weight, _eps(module), offset, self._current)
        if ours is not None:
            self._model.set_submodule(name, ours)
            self._replaced.append(name)

    def _linear(self, name: str, module: nn.Linear) -> Linear:
        shape = module.out_features, module.in_features
        if name == self._head:
            return self._output_head(name, module)
        if name not in self._products:
            group = next((names for names in self._siblings if name in names), [name])
            layers = [self._model.get_submodule(each) for each in group]
            if len({layer.bias is None for layer in layers}) > 1 or any(
                type(layer) is not nn.Linear for layer in layers
            ):
                group, layers = [name], [module]
            product = self._product(group, [layer.out_features for layer in layers], shape[1], module.bias is not None)
            self._products |= {each: (product, index) for index, each in enumerate(group)}
        return Linear(*self._products[name], self._current, self._like)

    def _product(self, names: list[str], widths: list[int], in_features: int, bias: bool) -> Product:
        for each in names:
            self._convert(f"{each}.weight")
        quantise = not any(each.rpartition(".")[2] in ROUTERS for each in names)
        return Product(self._weights.linear(names, widths, in_features, bias, quantise=quantise), widths)

    def _output_head(self, name: str, module: nn.Linear) -> Linear:
        shape = module.out_features, module.in_features
        bias = None
        if self._description.is_tied:
            head = self._weights.tied_head(self._embedding, name, *shape)
            bias = None if module.bias is None else self._weights.take(f"{name}.bias", shape[:1])
        else:
            head = self._weights.linear([name], [shape[0]], shape[1], module.bias is not None)
        return Linear(Product(head, [shape[0]], torch.float32), 0, self._current, self._like, bias)

    def _is_gated(self, name: str, module: Any) -> bool:
        """Whether the module is a gated MLP with the usual names."""
        children = dict(module.named_children())
        if set(children) != {*_MLP, "act_fn"} or type(children["act_fn"]) not in GATES:
            return False
        layers = [children[each] for each in _MLP]
        called = all(self._description.calls.linear[f"{name}.{each}"] == 1 for each in _MLP)
        return (
            called
            and all(type(layer) is nn.Linear for layer in layers)
            and len({layer.bias is None for layer in layers}) == 1
        )

    def _mlp(self, name: str, module: Any) -> Mlp:
        inner, hidden = module.up_proj.out_features, module.up_proj.in_features
        bias = module.up_proj.bias is not None
        for each in _MLP:
            self._convert(f"{name}.{each}.weight")
        gate_up = self._weights.linear([f"{name}.{each}" for each in _MLP[:2]], [inner, inner], hidden, bias)
        down = self._weights.linear([f"{name}.{_MLP[2]}"], [hidden], inner, bias)
        return Mlp(GatedMlp(gate_up, down, GATES[type(module.act_fn)]), self._current)

    def _token_embedding(self, name: str, module: nn.Embedding) -> Embedding:
        shape = module.num_embeddings, module.embedding_dim
        table = self._weights.embedding(name, shape)
        lora = self._weights.slots.embedding(name, *shape)
        return Embedding(table, lora, self._weights.dtype, self._current, module)

    def _experts(self, name: str, module: Any) -> Experts | None:
        conversions = self._description.names.conversions
        layout = ExpertLayout(transposed=module.is_transposed)
        count, hidden = len(module.gate_up_proj), self._description.config.hidden_size
        inner = module.down_proj.shape[1 if module.is_transposed else 2]
        products = []
        for stacked, parts, sizes in (
            ("gate_up_proj", ("gate_proj", "up_proj"), (inner, hidden)),
            ("down_proj", ("down_proj",), (hidden, inner)),
        ):
            target = f"{name}.{stacked}"
            source: Any = self._weights.tensors
            conversion = conversions.get(target)
            if conversion is None:
                source = StackedTensors(self._weights.tensors, target, count, parts, layout)
                names = [[f"{name}.{expert}.{part}" for part in parts] for expert in range(count)]
            else:
                names = conversion.experts() or []
            if len(names) != count or len(names[0]) != len(parts):
                return None
            share = self._description.top_k / count
            products.append(self._weights.experts(target, names, *sizes, share, source))
        gate_up, down = products
        gate = GATES[type(module.act_fn)]
        return Experts(ExpertWeights(gate_up.op, gate_up.weight, down.weight, count, inner, gate), self._current)

    def fill(self) -> None:
        """Load the parameters and buffers that transformers' code reads itself, in the dtype of activations."""
        tied = self._model.all_tied_weights_keys
        for name, parameter in list(self._model.named_parameters()):
            if name not in tied and parameter.device.type == "meta":
                value = self._take(name, parameter.shape).to(self._dtype_of(name))
                _set(self._model, name, nn.Parameter(value, requires_grad=False))
        for name, source in tied.items():
            if not self._is_replaced(name):
                _set(self._model, name, self._model.get_parameter(source))
        stored = set(self._model.state_dict())
        for name, buffer in list(self._model.named_buffers()):
            is_stored = name in stored and not self._is_replaced(name)
            value = self._take(name, buffer.shape).to(buffer.dtype) if is_stored else buffer
            _set(self._model, name, value.to(self._weights.device))

    def _dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a parameter: float32 where the class demands it."""
        strict = self._model._keep_in_fp32_modules_strict or ()
        is_wide = any(re.search(rf"\b{part}\b", name) for part in strict)
        return torch.float32 if is_wide else self._weights.dtype

    def _is_replaced(self, name: str) -> bool:
        return any(name.startswith(f"{each}.") for each in self._replaced)

    def _take(self, name: str, shape: torch.Size) -> Tensor:
        self._convert(name)
        return self._weights.take(name, shape)

    def _convert(self, name: str) -> None:
        """Make the tensor `name` from other tensors of the files, if it is one of a conversion."""
        for target, conversion in self._description.names.conversions.items():
            if target == name:
                for each, value in conversion.parameters(self._weights, target, self._model.config).items():
                    self._weights.tensors.provide(each, value)


def _set(model: Any, name: str, value: Tensor) -> None:
    parent, _, own = name.rpartition(".")
    module = model.get_submodule(parent)
    if isinstance(value, nn.Parameter):
        module._parameters[own] = value
    else:
        module._buffers[own] = value


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", None) or module.eps)


def norm_offset(module: Any) -> float | None:
    """The number that an RMS norm of transformers adds to its weight; None if the module is no such norm. Compares the
    results for random numbers."""
    parameters = dict(module.named_parameters(recurse=False))
    is_norm = type(module).__name__.endswith("RMSNorm") and set(parameters) == {"weight"}
    if not is_norm or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return None
    norm = copy(module)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(2, module.weight.shape[0], generator=generator)
    norm._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    result = norm(x.unsqueeze(0))
    for offset in (0.0, 1.0):
        if torch.allclose(result, rms_norm(x.unsqueeze(0), weight, _eps(module), offset), atol=1e-5):
            return offset
    return None
