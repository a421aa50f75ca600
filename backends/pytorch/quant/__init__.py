"""Weight formats, one file each: made while loading (int8, int4, fp8), or read as others made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.ops.linear import Fp8, Int4, Int8, Weight


class Tensors(Protocol):
    """The stored tensors of a model, each taken once."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str:
        """As the file's header says, e.g. "BF16"; empty where there is no such tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """As the file's header says; (0,) where there is no such tensor."""
        ...

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        """A view of the file. Raises ModelRefused where it is missing or of another shape or type."""
        ...


class Loaded(NamedTuple):
    """A weight in the form its product takes."""

    weight: Weight
    wide: bool = False  # int4: activations are not rounded, since the weights were made for that
    order: Tensor | None = None  # [ins] int64: the product takes the inputs in this order

    @property
    def product(self) -> str:
        """The field of kernels.ops.Linear."""
        match self.weight:
            case Int8():
                return "int8"
            case Int4():
                return "int4_wide" if self.wide else "int4"
            case Fp8():
                return "fp8"
        return "dense"

    def joins(self, other: Loaded) -> bool:
        """Whether one product can do the work of both."""
        if self.product != other.product or (self.order is None) != (other.order is None):
            return False
        if self.order is not None and other.order is not None and not torch.equal(self.order, other.order):
            return False
        return _kind(self.weight) == _kind(other.weight)


class Scheme(Protocol):
    """How the projections of a model become weights."""

    @property
    def zero_biases(self) -> bool:
        """Whether a bias that the model does not have may be stored, if it is all zeros."""
        ...

    def load(self, tensors: Tensors, name: str, outs: int, ins: int) -> Loaded:
        """The weight [outs, ins] of the projection `name` ("model.layers.0.mlp.up_proj"). Raises ModelRefused."""
        ...


def joined(weights: Sequence[Weight]) -> Weight:
    """Weights of one kind and width one below the other, so that one product does the work of all."""
    first, rest = weights[0], [parts(weight) for weight in weights[1:]]
    if not rest:
        return first
    columns = iter(zip(parts(first), *rest, strict=True))
    return changed(first, lambda _: torch.cat(next(columns)))


def changed(weight: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The weight with each of its tensors changed, in the order of `parts`."""
    if isinstance(weight, Tensor):
        return change(weight)
    return type(weight)(*(change(part) if isinstance(part, Tensor) else part for part in weight))


def _kind(weight: Weight) -> tuple[object, ...]:
    """Equal for weights of one width that differ in their numbers alone."""
    if isinstance(weight, Tensor):
        return (weight.dtype,)
    return tuple(part.dtype if isinstance(part, Tensor) else part for part in weight)


def parts(weight: Any) -> list[Tensor]:
    """The tensors that a weight, packed or not, is made of."""
    return [weight] if isinstance(weight, Tensor) else [part for part in weight if isinstance(part, Tensor)]


def held_bytes(weight: Any) -> int:
    """Memory that a weight, packed or not, takes."""
    return sum(part.nbytes for part in parts(weight))
