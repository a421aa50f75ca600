"""Opaque ops for tracing: attention, scans, products with packed weights, routers and experts.

Tracing follows tensors only. The rows, pages and states of attention and of scans change with every step, so the
forward pass is cut there (SGLang's piecewise graphs). Packed weights are not tensors, so products and experts look them
up in the current Model. Graphs can capture experts, so the forward pass is not cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....kernels.ops import Ops
from ....kernels.ops.attention import Attend, Rows
from ....kernels.ops.kv import Append
from ....kernels.ops.moe import ExpertWeights, Routed, Routing
from ....kernels.ops.projection import Product
from ....kernels.ops.scan import LayerStates, Scan


@dataclass(frozen=True, slots=True)
class Site:
    """The arguments of one layer's attention that are the same in every step."""

    target: Append
    attended: Attend
    group: int = 0  # the cache group of the layer

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, ops: Ops, slots: Tensor, rows: Rows) -> Tensor:
        """Write keys and values to the cache, and return the outputs of attention [tokens, heads, dim]."""
        query = ops.kv.append(qkv, cos, sin, slots, self.target)
        return ops.attention.paged(query, rows, self.attended)


@dataclass(frozen=True, slots=True)
class LatentSite:
    """The constant arguments of one layer's latent attention: those of kv.append_latent and attention.latent."""

    rotation: str
    pages: tuple[Tensor, ...]
    scale: float
    start: int
    group: int = 0

    def attend(self, heads: Tensor, cos: Tensor, sin: Tensor, ops: Ops, slots: Tensor, rows: Rows) -> Tensor:
        """Write keys to the cache, and return the outputs of attention [tokens, query heads, value dim]."""
        query = ops.kv.append_latent(heads, cos, sin, self.rotation, slots, self.pages)
        return ops.attention.latent(query, self.pages, rows, self.scale, self.start)


@dataclass(frozen=True, slots=True)
class ScanSite:
    """The scan of one recurrent layer, and the states of all layers."""

    scan: Scan
    states: tuple[LayerStates, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """The values that opaque ops look up when they run."""

    products: Mapping[int, Product]  # address of the first tensor of a product's weight -> the product
    ops: Ops
    # Address of the first tensor of gate_up -> the weights of all experts.
    experts: Mapping[int, ExpertWeights] = field(default_factory=dict)


_MODEL: ContextVar[Model] = ContextVar("model")


@contextmanager
def computing(model: Model) -> Iterator[None]:
    """A context manager: opaque ops that run in its block take their weights and kernels from `model`."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


# `attend` and `scan` have no implementation: the traced graph is cut at these ops, and the sites compute them.
torch.library.define(
    "localllm_graphs::attend", "(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) out, int site) -> ()"
)
torch.library.define("localllm_graphs::scan", "(Tensor[] inputs, Tensor(a!) out, int site) -> ()")
torch.library.define(
    "localllm_graphs::product", "(Tensor x, Tensor weight, int out_features, ScalarType dtype) -> Tensor"
)
torch.library.define(
    "localllm_graphs::route",
    "(Tensor logits, Tensor? correction, int top_k, str score, bool renormalise, float scale, int groups, "
    "int top_groups, str group_score) -> (Tensor, Tensor)",
)
torch.library.define("localllm_graphs::experts", "(Tensor x, Tensor chosen, Tensor shares, Tensor weight) -> Tensor")


@torch.library.register_fake("localllm_graphs::attend")  # type: ignore[untyped-decorator]
def _(qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, site: int) -> None:
    pass


@torch.library.register_fake("localllm_graphs::scan")  # type: ignore[untyped-decorator]
def _(inputs: list[Tensor], out: Tensor, site: int) -> None:
    pass


@torch.library.impl("localllm_graphs::product", "default")
def _product(x: Tensor, weight: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    model = _MODEL.get()
    return model.products[weight.data_ptr()](x, model.ops, dtype=dtype)


@torch.library.register_fake("localllm_graphs::product")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=dtype)


@torch.library.impl("localllm_graphs::route", "default")
def _route(logits: Tensor, correction: Tensor | None, *routing: Any) -> tuple[Tensor, Tensor]:
    routed: Routed = _MODEL.get().ops.moe.route(logits, Routing(*routing), correction)
    return routed.experts, routed.weights


@torch.library.register_fake("localllm_graphs::route")  # type: ignore[untyped-decorator]
def _(logits: Tensor, correction: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


@torch.library.impl("localllm_graphs::experts", "default")
def _experts(x: Tensor, chosen: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    model = _MODEL.get()
    result: Tensor = model.ops.moe.experts(x, Routed(chosen, shares), model.experts[weight.data_ptr()])
    return result


@torch.library.register_fake("localllm_graphs::experts")  # type: ignore[untyped-decorator]
def _(x: Tensor, chosen: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)


attend = torch.ops.localllm_graphs.attend.default
scan = torch.ops.localllm_graphs.scan.default
product = torch.ops.localllm_graphs.product.default
route = torch.ops.localllm_graphs.route.default
experts = torch.ops.localllm_graphs.experts.default
