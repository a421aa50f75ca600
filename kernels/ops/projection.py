"""Projections: weights together with the product op of their format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .step import HeadStep, LayerStep

if TYPE_CHECKING:
    from . import Ops


class Projection(Protocol):
    """A linear map in a layer: qkv, out, gate_up, down or the output head."""

    @property
    def product(self) -> Product | None:
        """The product that computes the whole projection without adapters, for fused kernels; None if there is none."""
        ...

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """x [tokens, in_features] -> [tokens, out_features] in `dtype`, by default x's dtype. `step` has the adapters
        of the tokens; if it is None, no adapter applies."""
        ...


class Product(NamedTuple):
    """One product. It computes one projection, or several of the same input with their weights concatenated by output
    (q, k and v, for example)."""

    op: str  # name of a field of linear.Linear
    weight: Any  # packed by the device's linear.pack
    bias: Tensor | None = None
    order: Tensor | None = None  # [in_features] int64: permutation of the inputs; None: natural order

    @property
    def product(self) -> Product:
        return self

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        result: Tensor = getattr(ops.linear, self.op)(x, self.weight, self.bias, dtype)
        return result


class SideBySide(NamedTuple):
    """Projections of one input that cannot share a product, because their formats or input orders differ."""

    products: tuple[Product, ...]

    @property
    def product(self) -> None:
        return None

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return torch.cat([product(x, ops, step, dtype) for product in self.products], dim=-1)
