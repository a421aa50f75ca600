"""Weight formats, one file each. Weights are quantised while loading (int8, int4, fp8), or quantised in the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ....kernels.ops.linear import PANEL, Fp8, Int4, Int8, Mxfp4, Weight, map_tensors, weight_tensors


class Tensors(Protocol):
    """The tensors in a model's files. Each may be read once."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str:
        """The dtype in the file's header, e.g. "BF16"; empty if the tensor is missing."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file's header; (0,) if the tensor is missing."""
        ...

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        """The tensor, as a view of the file. Raises ModelRefused if the tensor is missing, if its shape is not `shape`,
        or if its dtype is not in `dtypes`."""
        ...


SLICE_VALUES = 2**21  # values of a weight that are converted at a time, so that their float32 copies fit in CPU caches
EIGHT = 8  # some formats pack eight outputs in a word, so weights are loaded by multiples of eight outputs


class Loaded(NamedTuple):
    """A weight that is converted slice by slice to the format that its matrix product reads. The whole unconverted
    weight is never in memory."""

    out_features: int
    in_features: int
    # (start, stop) -> the weight of the outputs start … stop - 1. `start` and `stop` are multiples of EIGHT, or
    # out_features. Raises ModelRefused.
    rows: Callable[[int, int], Weight]
    wide: bool = False  # int4: the product must not round the activations
    order: Tensor | None = None  # [in_features] int64: permutation of the inputs; None: natural order
    bias: Tensor | None = None  # [out_features] float32: the bias, if the format has it; else it is a tensor of floats
    inputs: tuple[float, float] | None = None  # static scale and offset of the activations; None: none

    @property
    def product(self) -> str:
        """The name of the op in kernels.ops.Linear that multiplies this weight."""
        match self._example():
            case Int8():
                return "int8"
            case Int4():
                return "int4_wide" if self.wide else "int4"
            case Fp8():
                return "fp8"
            case Mxfp4():
                return "mxfp4"
        return "dense"

    @property
    def format(self) -> tuple[object, ...]:
        """A key that is equal for weights with the same product, dtypes, group size and number of inputs."""
        return self.product, self.in_features, self.inputs, *_kind(self._example())

    def joins(self, other: Loaded) -> bool:
        """Whether the two weights can be concatenated along their outputs and multiplied by one product."""
        return self.format == other.format and _equal(self.order, other.order)

    def _example(self) -> Weight:
        return self.rows(0, min(EIGHT, self.out_features))


class Scheme(Protocol):
    """Loads the projections of a model from one weight format."""

    def load(self, tensors: Tensors, name: str, out_features: int, in_features: int) -> Loaded:
        """The weight [out_features, in_features] of the projection `name` ("model.layers.0.mlp.up_proj").

        Loaded.rows must read mapped tensors in the order of their outputs, because the caller releases the pages of the
        file between two calls. Tensors in another order must be copied. Raises ModelRefused.
        """
        ...


def slices(loaded: Sequence[Loaded]) -> Iterator[Weight]:
    """The concatenation of the weights along their outputs, slice by slice, for linear.pack_slices. A slice may span
    two weights."""
    total = sum(weight.out_features for weight in loaded)
    in_features = loaded[0].in_features
    step = max(1, SLICE_VALUES // max(1, in_features) // PANEL) * PANEL
    for start in range(0, total, step):
        ranges = []
        offset = 0  # index of the weight's first output in the concatenation
        for weight in loaded:
            begin = max(0, start - offset)
            end = min(weight.out_features, start + step - offset)
            if begin < end:
                ranges.append(weight.rows(begin, end))
            offset += weight.out_features
        yield _concatenated(ranges)


def quotient(values: Tensor, divisor: float) -> Tensor:
    """values / divisor, with the same bits on every device. On a GPU torch replaces the division by a number with a
    multiplication by its rounded reciprocal, so the divisor is a tensor here."""
    return values / values.new_full((), divisor)


def _concatenated(weights: Sequence[Weight]) -> Weight:
    """The concatenation of the weights along their outputs. All weights have the same format."""
    first = weights[0]
    others = [weight_tensors(weight) for weight in weights[1:]]
    if not others:
        return first
    columns = iter(zip(weight_tensors(first), *others, strict=True))
    joined: Weight = map_tensors(first, lambda _: torch.cat(next(columns)))
    return joined


def _kind(weight: Weight) -> tuple[object, ...]:
    """A key that is equal for weights with equal format, group size and number of inputs."""
    if isinstance(weight, Tensor):
        return (weight.dtype,)
    return tuple(field.dtype if isinstance(field, Tensor) else field for field in weight)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def memory_bytes(weight: Any) -> int:
    """Bytes of memory of a weight, packed or not."""
    return sum(tensor.nbytes for tensor in weight_tensors(weight))
