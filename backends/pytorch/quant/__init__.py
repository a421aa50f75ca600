"""Weight formats, one file each: quantised while loading (int8, int4, fp8), or read from a quantised checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.ops.linear import PANEL, Fp8, Int4, Int8, Weight, map_tensors, weight_tensors


class Tensors(Protocol):
    """The stored tensors of a model. Each may be read once."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str:
        """The dtype in the file's header, e.g. "BF16"; empty if the tensor is missing."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file's header; (0,) if the tensor is missing."""
        ...

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        """A view of the file. Raises ModelRefused if the tensor is missing or has another shape or dtype."""
        ...


SLICE_VALUES = 2**21  # values of a weight that are converted at a time: their float32 copies fit in the CPU caches
EIGHT = 8  # smallest number of outputs to load: some formats pack eight outputs in a word


class Loaded(NamedTuple):
    """A weight in the format of its product, converted by slices of outputs: the whole weight is never in memory."""

    out_features: int
    in_features: int
    rows: Callable[[int, int], Weight]  # outputs start … stop, multiples of EIGHT or the end; may raise ModelRefused
    wide: bool = False  # int4: activations are not rounded, as the checkpoint expects
    order: Tensor | None = None  # [in_features] int64: permutation of the inputs; None: natural order

    @property
    def product(self) -> str:
        """The name of the field of kernels.ops.Linear that multiplies this weight."""
        match self._sample():
            case Int8():
                return "int8"
            case Int4():
                return "int4_wide" if self.wide else "int4"
            case Fp8():
                return "fp8"
        return "dense"

    def joins(self, other: Loaded) -> bool:
        """Whether one product can compute both weights, one below the other."""
        if self.product != other.product or (self.order is None) != (other.order is None):
            return False
        if self.order is not None and other.order is not None and not torch.equal(self.order, other.order):
            return False
        return _kind(self._sample()) == _kind(other._sample())

    def _sample(self) -> Weight:
        return self.rows(0, min(EIGHT, self.out_features))


class Scheme(Protocol):
    """Loads the projections of a model from one weight format."""

    @property
    def zero_biases(self) -> bool:
        """Whether the files may have a bias of zeros for a projection that has no bias in the model."""
        ...

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        """The weight [out_features, in_features] of the projection `name` ("model.layers.0.mlp.up_proj").

        Raises ModelRefused.

        `rows` of the result must read mapped tensors in the order of outputs: the caller releases the pages of the
        file between two calls. Other tensors must be copied.
        """
        ...


def slices(loaded: Sequence[Loaded]) -> Iterator[Weight]:
    """Slices of the weights, joined along the outputs, for linear.pack_slices. A slice may span two weights."""
    total = sum(weight.out_features for weight in loaded)
    in_features = loaded[0].in_features
    step = max(1, SLICE_VALUES // max(1, in_features) // PANEL) * PANEL
    for start in range(0, total, step):
        pieces = []
        offset = 0
        for weight in loaded:
            begin = max(0, start - offset)
            end = min(weight.out_features, start + step - offset)
            if begin < end:
                pieces.append(weight.rows(begin, end))
            offset += weight.out_features
        yield _joined(pieces)


def _joined(weights: Sequence[Weight]) -> Weight:
    first = weights[0]
    others = [weight_tensors(weight) for weight in weights[1:]]
    if not others:
        return first
    columns = iter(zip(weight_tensors(first), *others, strict=True))
    joined: Weight = map_tensors(first, lambda _: torch.cat(next(columns)))
    return joined


def _kind(weight: Weight) -> tuple[object, ...]:
    """A key that is equal for weights of one format, group size and number of inputs, whatever their values."""
    if isinstance(weight, Tensor):
        return (weight.dtype,)
    return tuple(part.dtype if isinstance(part, Tensor) else part for part in weight)


def memory_bytes(weight: Any) -> int:
    """Bytes of memory of a weight, packed or not."""
    return sum(part.nbytes for part in weight_tensors(weight))
