"""LoRA adapters on MLX: stores the factors of each module in adapter slots, and adds their products to the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Ints
from ...engine.errors import ModelRefused
from ...engine.files.adapter_files import Factors
from ...engine.files.adapter_fit import read_for_model
from ...engine.files.tensor_files import StoredTensor
from ...engine.files.tensor_values import Floats, read_values
from ...engine.lora import Adapter
from .adapter import Target, add_to_output, tied_embedding


class Pair(NamedTuple):
    """The LoRA factors of one module. `b` is already multiplied by the scale in the adapter's files."""

    a: mx.array  # [in_features, rank]
    b: mx.array  # [rank, out_features]


@dataclass(frozen=True, slots=True)
class Rows:
    """The adapter slot and the scale of each row in one call of the model."""

    slots: frozenset[int]
    positions: mx.array  # [rows] uint32: 0…rows-1
    indices: mx.array  # [rows] uint32: the slot of each row
    scales: mx.array | None  # [rows, 1, 1]; None: every scale is 1


@dataclass(slots=True)
class Current:
    """The rows of the call that the model computes now; all modules share this record."""

    rows: Rows | None = None  # None: no row has an adapter


class ModuleSlots:
    """The factors of one module. They are zero in slot 0, and in a slot whose adapter does not change the module."""

    def __init__(self, target: Target, size: int, dtype: mx.Dtype, current: Current) -> None:
        self._a = mx.zeros((size, target.in_features, 0), dtype)  # [slots, in_features, rank]
        self._b = mx.zeros((size, 0, target.out_features), dtype)  # [slots, rank, out_features]
        self._current = current
        self._used: set[int] = set()  # the slots whose factors are not zero

    def put(self, slot: int, size: int, pair: Pair | None) -> None:
        """Set the factors of a slot; None sets them to zero. Enlarges the arrays to at least `size` slots."""
        if pair is None and slot not in self._used and size <= len(self._a):
            return
        rank = max(self._a.shape[2], 0 if pair is None else pair.a.shape[1])
        a = _padded(self._a, (size, 0, rank))
        b = _padded(self._b, (size, rank, 0))
        a[slot] = 0 if pair is None else _padded(pair.a, (0, rank))
        b[slot] = 0 if pair is None else _padded(pair.b, (rank, 0))
        mx.eval(a, b)  # computed first: if memory runs out, the old arrays stay
        self._a = a
        self._b = b
        if pair is None:
            self._used.discard(slot)
        else:
            self._used.add(slot)

    def add_product(self, output: mx.array, x: mx.array) -> mx.array:
        """`output` [rows, tokens, out_features] plus scale * B(A(x)), for `x` [rows, tokens, in_features]."""
        rows = self._current.rows
        if rows is None or rows.slots.isdisjoint(self._used):
            return output
        return self._expanded(output, mx.gather_mm(x, self._a, rows.positions, rows.indices), rows)

    def add_embedding(self, output: mx.array, tokens: mx.array) -> mx.array:
        """`output` [rows, tokens, out_features] plus scale * B(A[token]), for `tokens` [rows, tokens]."""
        rows = self._current.rows
        if rows is None or rows.slots.isdisjoint(self._used):
            return output
        return self._expanded(output, self._a[rows.indices[:, None], tokens], rows)

    def _expanded(self, output: mx.array, inner: mx.array, rows: Rows) -> mx.array:
        """`output` plus scale * B(inner), for `inner` [rows, tokens, rank]."""
        if rows.scales is not None:
            inner = inner * rows.scales
        delta = mx.gather_mm(inner, self._b, rows.positions, rows.indices)
        return output + delta.astype(output.dtype)


def _padded(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    """The array, padded with zeros at the end of each dimension that is smaller than in `shape`."""
    return mx.pad(array, [(0, max(0, size - old)) for old, size in zip(array.shape, shape, strict=True)])


class AdapterSlots:
    """The adapter slots of a model. A slot takes no memory until its first adapter is loaded."""

    def __init__(
        self, targets: Mapping[str, Target], max_rank: int, dtype: mx.Dtype, base: Mapping[str, StoredTensor]
    ) -> None:
        """`targets`: the modules that can have factors. `dtype`: the dtype of the activations. `base`: the tensors in
        the files of the model."""
        self._base = base
        self._dtype = _factor_dtype(dtype)
        self._targets = targets
        self._shapes = {name: (target.out_features, target.in_features) for name, target in targets.items()}
        self._max_rank = max_rank
        self._tied_embedding = tied_embedding(targets)
        self._modules: dict[str, ModuleSlots] = {}
        self._prepared: dict[Adapter, dict[str, Pair]] = {}
        self._size = 1
        self._current = Current()

    def select(self, slots: Ints, scales: NDArray[np.float32]) -> None:
        """Set the adapter slot and the scale of each row for the next call of the model."""
        if not slots.any():
            self._current.rows = None
            return
        factors = None if (scales == 1).all() else mx.array(scales[:, None, None], self._dtype)
        positions = mx.array(np.arange(len(slots), dtype=np.uint32))
        indices = mx.array(slots.astype(np.uint32))
        self._current.rows = Rows(frozenset(slots.tolist()), positions, indices, factors)

    def prepare(self, adapter: Adapter) -> None:
        """Read an adapter's files to main memory. Raises ModelRefused if the adapter does not fit the model."""
        if adapter in self._prepared:
            return
        files = read_for_model(adapter, self._shapes, self._max_rank, self._base, self._tied_embedding)
        pairs: dict[str, Pair] = {}
        for name, factors in files.factors.items():
            a = _matrix(factors, factors.a)
            b = _matrix(factors, factors.b)
            with np.errstate(over="ignore"):  # infinity is refused below
                b *= np.float32(factors.scale)
            pairs[name] = Pair(self._finite(a, name), self._finite(b, name))
        self._prepared[adapter] = pairs

    def _finite(self, matrix: NDArray[np.float32], module: str) -> mx.array:
        """The factor on the device. Raises ModelRefused if a value is above the largest number of the dtype."""
        array = mx.array(matrix, self._dtype)
        if not mx.isfinite(array).all().item():
            raise ModelRefused(f"{module}: the scale or a LoRA factor is too large for {self._dtype}")
        return array

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copy a prepared adapter into the slot. Steps that were started before keep the old factors."""
        pairs = self._prepared[adapter]
        size = max(self._size, slot + 1)
        for name in pairs.keys() - self._modules.keys():
            target = self._targets[name]
            module = ModuleSlots(target, size, self._dtype, self._current)
            self._modules[name] = module
            add_to_output(target, module.add_embedding if target.reads_tokens else module.add_product)
        for name, module in self._modules.items():
            module.put(slot, size, pairs.get(name))
        self._size = size

    def forget(self, adapter: Adapter) -> None:
        """Free the main memory of a prepared adapter."""
        self._prepared.pop(adapter, None)


def slot_bytes(targets: Mapping[str, Target], rank: int, dtype: mx.Dtype) -> int:
    """The bytes of a slot whose adapter has factors of rank `rank` for all targets. `dtype`: the dtype of the
    activations."""
    values = sum(target.in_features + target.out_features for target in targets.values())
    return values * rank * _factor_dtype(dtype).size


def _factor_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of the factors for activations of `dtype`: on the CPU gather_mm supports only float32."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return mx.float32 if on_cpu else dtype


def _matrix(factors: Factors, stored: StoredTensor) -> Floats:
    """A factor, [in_features, rank] or [rank, out_features]. Raises ModelRefused for NaN or infinity."""
    matrix = read_values(stored)
    if not np.isfinite(matrix).all():
        raise ModelRefused(f"{stored.file.name}: a LoRA factor contains NaN or infinity")
    return matrix if factors.transposed else matrix.T
