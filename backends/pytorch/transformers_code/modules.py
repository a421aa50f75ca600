"""Our modules in place of those of transformers' code: linear layers, the embedding, and experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....kernels.ops.lora import LoraWeights
from ....kernels.ops.moe import ExpertWeights, Routed
from ....kernels.ops.projection import Projection
from ....kernels.ops.step import HeadStep
from .attention import Current


class Linear(nn.Module):
    """A projection of our weights, in any format and with adapters. `dtype`: of its results; None: of its inputs."""

    def __init__(
        self,
        projection: Projection,
        current: Current,
        like: Tensor,
        *,
        dtype: torch.dtype | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """`like`: a tensor with the dtype of activations on the device. `bias`: if `projection` lacks it."""
        super().__init__()
        self._projection = projection
        self._current = current
        self._dtype = dtype
        self.weight = like  # code of transformers reads its dtype and device
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        current = self._current
        rows = x.reshape(-1, x.shape[-1])
        out = self._projection(rows, current.ops, HeadStep(current.adapters), self._dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], out.shape[-1])


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
