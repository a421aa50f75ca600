"""Ops whose implementation tracing does not see: attention, and products with packed weights.

Tracing follows tensors only. The rows and pages of attention change with every step, so the forward pass is cut at
attention (SGLang's piecewise graphs). Packed weights are not tensors, so products look them up in the current Model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.ops import Ops
from ....kernels.ops.attention import Rows
from ....kernels.ops.projection import Product


@dataclass(frozen=True, slots=True)
class Site:
    """The constant arguments of one layer's attention: those of the ops kv.append and attention.paged."""

    head_norms: tuple[Any, ...]  # query norm, key norm, eps, offset
    rotation: str
    key_pages: Tensor
    value_pages: Tensor
    options: tuple[Any, ...]

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, ops: Ops, slots: Tensor, rows: Rows) -> Tensor:
        """Write keys and values to the cache, and return the outputs of attention [tokens, heads, dim]."""
        pages = self.key_pages, self.value_pages
        query = ops.kv.append(qkv, *self.head_norms, cos, sin, self.rotation, slots, *pages)
        return ops.attention.paged(query, *pages, rows, *self.options)


@dataclass(frozen=True, slots=True)
class LatentSite:
    """The constant arguments of one layer's latent attention: those of kv.append_latent and attention.latent."""

    rotation: str
    pages: Tensor
    scale: float
    start: int

    def attend(self, heads: Tensor, cos: Tensor, sin: Tensor, ops: Ops, slots: Tensor, rows: Rows) -> Tensor:
        """Write keys to the cache, and return the outputs of attention [tokens, query heads, value dim]."""
        query = ops.kv.append_latent(heads, cos, sin, self.rotation, slots, self.pages)
        return ops.attention.latent(query, self.pages, rows, self.scale, self.start)


@dataclass(frozen=True, slots=True)
class Model:
    """The values that opaque ops look up when they run."""

    products: Mapping[int, Product]  # address of the first tensor of a product's weight -> the product
    ops: Ops


_MODEL: ContextVar[Model] = ContextVar("model")


@contextmanager
def computing(model: Model) -> Iterator[None]:
    """A context manager: opaque ops that run in its block take their weights and kernels from `model`."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


# `attend` has no implementation: the traced graph is cut at this op, and Site.attend computes the attention.
torch.library.define(
    "localllm_graphs::attend", "(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) out, int site) -> ()"
)
torch.library.define(
    "localllm_graphs::product", "(Tensor x, Tensor weight, int out_features, ScalarType dtype) -> Tensor"
)


@torch.library.register_fake("localllm_graphs::attend")  # type: ignore[untyped-decorator]
def _(qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, site: int) -> None:
    pass


@torch.library.impl("localllm_graphs::product", "default")
def _product(x: Tensor, weight: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    model = _MODEL.get()
    return model.products[weight.data_ptr()](x, model.ops, dtype=dtype)


@torch.library.register_fake("localllm_graphs::product")  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=dtype)


attend = torch.ops.localllm_graphs.attend.default
product = torch.ops.localllm_graphs.product.default
