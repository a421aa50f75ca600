"""Ops that a traced forward holds without looking inside: attention, which depends on the rows, and products.

What they compute with besides their arguments is that of the model and of the step under way: tracing sees tensors
only, and rows, pages and packed weights are no tensors that all steps share (SGLang's piecewise graphs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """One attention of a model: what stays the same from step to step. Fields as in kv.append and attention.paged."""

    head_norms: tuple[Any, ...]  # of queries, of keys, eps and offset
    rotation: str
    key_pages: Tensor
    value_pages: Tensor
    options: tuple[Any, ...]

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, ops: Ops, slots: Tensor, rows: Rows) -> Tensor:
        """Store keys and values, and the answers to the queries [tokens, heads, dim]."""
        pages = self.key_pages, self.value_pages
        query = ops.kv.append(qkv, *self.head_norms, cos, sin, self.rotation, slots, *pages)
        return ops.attention.paged(query, *pages, rows, *self.options)


@dataclass(frozen=True, slots=True)
class Model:
    """What ops find of a model."""

    sites: Sequence[Site]
    products: Mapping[int, Product]  # by the address of their weight's first tensor
    ops: Ops


@dataclass(frozen=True, slots=True)
class Forward:
    """A model, and the step it is at."""

    model: Model
    slots: Tensor
    rows: Rows


_MODEL: ContextVar[Model] = ContextVar("model")
_FORWARD: ContextVar[Forward] = ContextVar("forward")


@contextmanager
def computing(model: Model, forward: Forward | None = None) -> Iterator[None]:
    """Within, ops that were traced find their model; attention only where the step is given as well."""
    before = _MODEL.set(model)
    step = None if forward is None else _FORWARD.set(forward)
    try:
        yield
    finally:
        _MODEL.reset(before)
        if step is not None:
            _FORWARD.reset(step)


torch.library.define(
    "localllm_graphs::attend", "(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) out, int site) -> ()"
)
torch.library.define("localllm_graphs::product", "(Tensor x, Tensor weight, int outs, ScalarType dtype) -> Tensor")


@torch.library.impl("localllm_graphs::attend", "default")
def _attend(qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, site: int) -> None:
    step = _FORWARD.get()
    out.copy_(step.model.sites[site].attend(qkv, cos, sin, step.model.ops, step.slots, step.rows))


@torch.library.register_fake("localllm_graphs::attend")
def _(qkv: Tensor, cos: Tensor, sin: Tensor, out: Tensor, site: int) -> None:
    pass


@torch.library.impl("localllm_graphs::product", "default")
def _product(x: Tensor, weight: Tensor, outs: int, dtype: torch.dtype) -> Tensor:
    model = _MODEL.get()
    return model.products[weight.data_ptr()](x, model.ops, dtype)


@torch.library.register_fake("localllm_graphs::product")
def _(x: Tensor, weight: Tensor, outs: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], outs), dtype=dtype)


attend = torch.ops.localllm_graphs.attend.default
product = torch.ops.localllm_graphs.product.default
