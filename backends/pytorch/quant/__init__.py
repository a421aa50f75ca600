"""Weight formats, one file each: made while loading (int8, int4, fp8), or read as others made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.ops.linear import PANEL, Fp8, Int4, Int8, Weight, changed, parts


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


AT_ONCE = 2**21  # values of a weight made at a time: their float32 copies stay small, and in the caches
EIGHT = 8  # formats that pack eight outputs together give no fewer


class Loaded(NamedTuple):
    """A weight in the form its product takes, made a number of outputs at a time: a large one is never there whole."""

    outs: int
    ins: int
    rows: Callable[[int, int], Weight]  # outputs start … stop, multiples of EIGHT or the end; it may raise ModelRefused
    wide: bool = False  # int4: activations are not rounded, since the weights were made for that
    order: Tensor | None = None  # [ins] int64: the product takes the inputs in this order

    @property
    def product(self) -> str:
        """The field of kernels.ops.Linear."""
        match self._some():
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
        return _kind(self._some()) == _kind(other._some())

    def _some(self) -> Weight:
        return self.rows(0, min(EIGHT, self.outs))


class Scheme(Protocol):
    """How the projections of a model become weights."""

    @property
    def zero_biases(self) -> bool:
        """Whether a bias that the model does not have may be stored, if it is all zeros."""
        ...

    def load(self, tensors: Tensors, name: str, outs: int, ins: int) -> Loaded:
        """The weight [outs, ins] of the projection `name` ("model.layers.0.mlp.up_proj"). Raises ModelRefused.

        What its rows take from files at each call lies there in the order of outputs: pages are let go in between.
        """
        ...


def slices(loaded: Sequence[Loaded]) -> Iterator[Weight]:
    """Weights that join one below the other, as kernels.ops.linear.pack_slices takes them; a slice may lie in two."""
    total = sum(one.outs for one in loaded)
    ins = loaded[0].ins
    step = max(1, AT_ONCE // max(1, ins) // PANEL) * PANEL
    for start in range(0, total, step):
        pieces = []
        before = 0
        for one in loaded:
            begin = max(0, start - before)
            end = min(one.outs, start + step - before)
            if begin < end:
                pieces.append(one.rows(begin, end))
            before += one.outs
        yield _joined(pieces)


def _joined(weights: Sequence[Weight]) -> Weight:
    first = weights[0]
    rest = [parts(weight) for weight in weights[1:]]
    if not rest:
        return first
    columns = iter(zip(parts(first), *rest, strict=True))
    joined: Weight = changed(first, lambda _: torch.cat(next(columns)))
    return joined


def _kind(weight: Weight) -> tuple[object, ...]:
    """Equal for weights of one width that differ in their numbers alone."""
    if isinstance(weight, Tensor):
        return (weight.dtype,)
    return tuple(part.dtype if isinstance(part, Tensor) else part for part in weight)


def held_bytes(weight: Any) -> int:
    """Memory that a weight, packed or not, takes."""
    return sum(part.nbytes for part in parts(weight))
