"""A projection: the product that its weight's format takes, with the weight as the device holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.ops import linear as family


class Projection(Protocol):
    """What layers call."""

    def __call__(self, x: Tensor, ops: Ops, dtype: torch.dtype | None = None) -> Tensor:
        """x [tokens, ins] -> [tokens, outs], in `dtype` or else x's."""
        ...


class Linear:
    """One product, for one projection or several side by side."""

    def __init__(self, product: str, weight: Any, bias: Tensor | None, order: Tensor | None = None) -> None:
        self.product, self.weight, self.bias, self.order = product, weight, bias, order
        self._choose: Callable[[family.Linear], Callable[..., Tensor]] = attrgetter(product)

    def __call__(self, x: Tensor, ops: Ops, dtype: torch.dtype | None = None) -> Tensor:
        if self.order is not None:
            x = x.index_select(-1, self.order)
        return self._choose(ops.linear)(x, self.weight, self.bias, dtype)


class SideBySide:
    """Projections of one input that cannot share a product: their formats or orders of inputs differ."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor, ops: Ops, dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([part(x, ops, dtype) for part in self.parts], dim=-1)
