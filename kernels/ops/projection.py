"""Projections: weights together with the product that their format takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops


class Projection(Protocol):
    """What layers call."""

    @property
    def product(self) -> Product | None:
        """The one product that computes it in a step without adapters, for kernels that fuse; None: there is none."""
        ...

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """x [tokens, ins] -> [tokens, outs], in `dtype` or else x's. The step is that of these tokens, with their
        adapters; None: outside of the layers, where no adapter applies."""
        ...


class Product(NamedTuple):
    """One product, for one projection or several of the same input, one below the other."""

    op: str  # a field of linear.Linear
    weight: Any  # as the device's linear.pack made it
    bias: Tensor | None = None
    order: Tensor | None = None  # [ins] int64: the product takes the inputs in this order

    @property
    def product(self) -> Product:
        return self

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        result: Tensor = getattr(ops.linear, self.op)(x, self.weight, self.bias, dtype)
        return result


class SideBySide(NamedTuple):
    """Projections of one input that cannot share a product: their formats or orders of inputs differ."""

    parts: tuple[Product, ...]

    @property
    def product(self) -> None:
        return None

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep | None = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([part(x, ops, step, dtype) for part in self.parts], dim=-1)
