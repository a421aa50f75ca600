"""Our modules in the place of those of transformers' code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations.moe import _default_apply_gate

from ....kernels.ops.lora import LoraWeights
from ....kernels.ops.mlp import Gate, GatedMlp
from ....kernels.ops.moe import ExpertWeights, Routed
from ....kernels.ops.projection import Projection
from ....kernels.ops.step import HeadStep
from .attention import Current

GATES: Mapping[type, Gate] = MappingProxyType(
    {nn.SiLU: "silu_and_mul", SiLUActivation: "silu_and_mul", nn.GELU: "gelu_and_mul", GELUTanh: "gelu_tanh_and_mul"}
)


class Product:
    """The projection of one input for several linear layers. The first layer that is called computes all of them."""

    def __init__(self, projection: Projection, widths: Sequence[int], dtype: torch.dtype | None = None) -> None:
        """`widths`: outputs of each layer. `dtype`: of the results; None: of the inputs."""
        self._projection = projection
        self._widths = list(widths)
        self._dtype = dtype
        self._input: Tensor | None = None
        self._parts: dict[int, Tensor] = {}  # results that are not read yet

    def part(self, x: Tensor, index: int, current: Current) -> Tensor:
        """x [..., in_features] -> the outputs of the layer `index`."""
        if self._input is not x or index not in self._parts:
            rows = x.reshape(-1, x.shape[-1])
            out = self._projection(rows, current.ops, HeadStep(current.adapters), self._dtype)
            self._parts = dict(enumerate(out.view(*x.shape[:-1], out.shape[-1]).split(self._widths, dim=-1)))
        part = self._parts.pop(index)
        self._input = x if self._parts else None
        return part


class Linear(nn.Module):
    """A linear layer with our weights, in any format and with adapters."""

    def __init__(
        self, product: Product, index: int, current: Current, like: Tensor, bias: Tensor | None = None
    ) -> None:
        """`index`: of the layer in `product`. `like`: a tensor with the dtype of activations on the device. `bias`: if
        `product` lacks it."""
        super().__init__()
        self._product = product
        self._index = index
        self._current = current
        self.weight = like  # code of transformers reads its dtype and device
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out = self._product.part(x, self._index, self._current)
        return out if self.bias is None else out + self.bias


class Mlp(nn.Module):
    """A gated MLP with our weights."""

    def __init__(self, mlp: GatedMlp, current: Current) -> None:
        super().__init__()
        self._mlp = mlp
        self._current = current

    def forward(self, x: Tensor) -> Tensor:
        mlp, current = self._mlp, self._current
        step = HeadStep(current.adapters)
        gated = getattr(current.ops.activation, mlp.gate)(mlp.gate_up(x.reshape(-1, x.shape[-1]), current.ops, step))
        return mlp.down(gated, current.ops, step).view(x.shape)


class Norm(nn.Module):
    """An RMS norm of the last dimension. `offset` is added to the weight."""

    def __init__(self, weight: Tensor, eps: float, offset: float, current: Current) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = self.eps = eps
        self._offset = offset
        self._current = current

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result: Tensor = self._current.ops.norm.rms(rows, self.weight, self.eps, self._offset)
        return result.view(x.shape)


class Embedding(nn.Module):
    """The embedding of the tokens."""

    def __init__(
        self, table: Tensor, lora: LoraWeights | None, dtype: torch.dtype, current: Current, module: nn.Embedding
    ) -> None:
        """`module`: the embedding of transformers' code, which may change the rows of the table, e.g. scale them."""
        super().__init__()
        self._module = None if type(module) is nn.Embedding else module
        module._parameters["weight"] = None
        self.weight = table
        self._lora = lora
        self._dtype = dtype
        self._current = current

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [1, tokens] -> [1, tokens, dim]."""
        ops, adapters = self._current.ops, self._current.adapters
        x = ops.linear.embedding(tokens[0], self.weight, 1.0, self._dtype)
        if adapters is not None and self._lora is not None:
            ops.lora.embedding(x, tokens[0], self._lora, adapters)
        if self._module is None:
            return x.unsqueeze(0)
        self._module._parameters["weight"] = x  # type: ignore[assignment]
        rows: Tensor = self._module(torch.arange(len(x), device=x.device).unsqueeze(0))
        return rows


class Experts(nn.Module):
    """The experts of a layer, behind the router of transformers' code."""

    def __init__(self, weights: ExpertWeights, current: Current) -> None:
        super().__init__()
        self._weights = weights
        self._current = current

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [tokens, hidden], chosen and shares [tokens, top_k] -> [tokens, hidden]."""
        routed = Routed(chosen.int(), shares.float())
        result: Tensor = self._current.ops.moe.experts(x, routed, self._weights)
        return result


def has_our_experts(module: Any) -> bool:
    """Whether the module has experts of our kind: gate and up side by side, a known activation, no biases."""
    if not hasattr(module, "is_concatenated") or not module.has_gate:
        return False
    is_plain = module.is_concatenated and not module.has_bias and not module.has_post_expert_norm
    return is_plain and type(module)._apply_gate is _default_apply_gate and type(module.act_fn) in GATES
