"""The adapter slots of a model: the LoRA factors of every projection, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.adapterfiles import Factors, read_for_model
from ...engine.errors import ModelRefused
from ...engine.lora import Adapter
from ...engine.modelconfig import ModelConfig
from ...engine.tensorfiles import StoredTensor
from ...kernels.ops.lora import LoraWeights
from ...kernels.ops.projection import Adapted, Projection
from .device import Device
from .mapped import MappedFiles
from .packed import allocate

ALIGNED = 64  # each projection begins at a multiple of this number of values


@dataclass(frozen=True, slots=True)
class Module:
    """The place of one module's factors in the values of a slot. The module is one slice of a merged projection."""

    weights: LoraWeights
    start: int  # index of the projection's first value: first the factors A of all slices, then their factors B
    index: int  # index of the module's slice in the projection
    in_features: int

    @property
    def out_features(self) -> int:
        return self.weights.widths[self.index]

    def a(self, values: Tensor) -> Tensor:
        """The module's factor A [rank, in_features], as a view of the values of a slot."""
        rank = self.weights.rank
        first = self.start + self.index * rank * self.in_features
        return values[first : first + rank * self.in_features].view(rank, self.in_features)

    def b(self, values: Tensor) -> Tensor:
        """The module's factor B [out_features, rank], as a view of the values of a slot."""
        rank = self.weights.rank
        slices = len(self.weights.widths)
        outputs = sum(self.weights.widths[: self.index])
        first = self.start + rank * (slices * self.in_features + outputs)
        return values[first : first + self.out_features * rank].view(self.out_features, rank)


class AdapterSlots:
    """Slots 1…count for adapters of rank `rank` or less. Slot 0 is the base model: its factors stay zero.

    All factors of a slot are contiguous in memory, so one copy loads an adapter. A prepared adapter has the same layout
    in main memory.
    """

    def __init__(self, count: int, rank: int, values: int, device: Device, dtype: torch.dtype) -> None:
        """`values`: the size of one slot in numbers (see `slot_values`)."""
        self.count = count
        self.rank = rank
        self.tied_embedding = ""  # name of the embedding that is also the output head
        self._values = values
        self._device = device
        self._dtype = dtype
        self._modules: dict[str, Module] = {}
        self._prepared: dict[Adapter, Tensor] = {}
        self._allocated = 0  # number of values in each slot that belong to a module
        self._pool = _zeros(count + 1 if count else 0, values, dtype).to(device.type)

    @property
    def bytes(self) -> int:
        return self._pool.nbytes

    def adapt(self, names: Sequence[str], widths: Sequence[int], in_features: int, base: Projection) -> Projection:
        """`base`, the projection that merges these modules, with buffers for their LoRA factors. `base` unchanged if
        there are no adapter slots."""
        if not self.count:
            return base
        return Adapted(base, self._allocate(names, widths, in_features))

    def embedding(self, name: str, vocab: int, width: int) -> LoraWeights | None:
        """Buffers for the LoRA factors of the embedding. None: there are no adapter slots."""
        return self._allocate([name], [width], vocab) if self.count else None

    def prepare(self, adapter: Adapter) -> None:
        """Read the adapter's files to main memory. Raises ModelRefused if the adapter does not fit the model."""
        if adapter in self._prepared:
            return
        shapes = {name: (module.out_features, module.in_features) for name, module in self._modules.items()}
        files = read_for_model(adapter, shapes, self.rank, self.tied_embedding)
        values = _zeros(1, self._values, self._dtype)[0]
        maps = MappedFiles()
        for name, factors in files.factors.items():
            module = self._modules[name]
            rank = factors.rank
            _copy_finite(module.a(values)[:rank], _matrix(maps, factors, factors.a), name)
            _copy_finite(module.b(values)[:, :rank], _matrix(maps, factors, factors.b) * factors.scale, name)
        self._prepared[adapter] = values.pin_memory() if self._device.pinned else values

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copy a prepared adapter into the slot. The copy takes effect after all steps that were started before.

        It runs on the stream of the steps: see streams.py for the cost of a second stream.
        """
        self._pool[slot].copy_(self._prepared[adapter], non_blocking=True)

    def forget(self, adapter: Adapter) -> None:
        """Free the main memory of a prepared adapter."""
        self._prepared.pop(adapter, None)

    def _allocate(self, names: Sequence[str], widths: Sequence[int], in_features: int) -> LoraWeights:
        outputs = sum(widths)
        a_size = len(names) * self.rank * in_features
        start = self._allocated
        end = start + a_size + outputs * self.rank
        assert end <= self._values, "slot_values counts too little for this model"
        self._allocated = -(-end // ALIGNED) * ALIGNED
        a = self._pool[:, start : start + a_size].unflatten(1, (-1, in_features))
        b = self._pool[:, start + a_size : end].unflatten(1, (outputs, self.rank))
        weights = LoraWeights(a, b, tuple(widths))
        for index, name in enumerate(names):
            self._modules[name] = Module(weights, start, index, in_features)
        return weights


def _matrix(maps: MappedFiles, factors: Factors, stored: StoredTensor) -> Tensor:
    """A factor as float32, [rank, in_features] or [out_features, rank]. Raises ModelRefused for NaN or infinity."""
    tensor = maps.tensor(stored).float()
    if not tensor.isfinite().all():
        raise ModelRefused(f"{stored.file.name}: a LoRA factor contains NaN or infinity")
    return tensor.T if factors.transposed else tensor


def _copy_finite(target: Tensor, matrix: Tensor, module: str) -> None:
    """Copy a factor. Raises ModelRefused if a value is above the largest number of the target's dtype."""
    target.copy_(matrix)
    if not target.isfinite().all():
        raise ModelRefused(f"{module}: the scale or a LoRA factor is too large for {target.dtype}")


def _zeros(rows: int, values: int, dtype: torch.dtype) -> Tensor:
    """Zeros [rows, values] in main memory. A page takes no memory until it is written, so unused slots cost nothing."""
    if not rows:
        return torch.zeros(0, values, dtype=dtype)
    return torch.frombuffer(allocate(rows * values * dtype.itemsize), dtype=dtype).view(rows, values)


def slot_values(config: ModelConfig, rank: int) -> int:
    """How many numbers one slot has: factors of rank `rank` for all linear layers, the embedding and the output
    head."""
    hidden = config.hidden_size
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    attention = 3 * hidden + heads + 2 * kv_heads + heads + hidden
    mlp = 2 * (hidden + inner) + inner + hidden
    ends = 2 * (config.vocab_size + hidden)
    projections = 4 * config.num_layers + 2
    return rank * (config.num_layers * (attention + mlp) + ends) + projections * ALIGNED


def pool_bytes(config: ModelConfig, count: int, rank: int, itemsize: int) -> int:
    """Bytes of `count` slots and of slot 0 together; 0 if `count` is 0."""
    return (count + 1) * slot_values(config, rank) * itemsize if count else 0
