"""The adapter slots of a model: the LoRA factors of every projection, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.files.adapter_files import Factors
from ...engine.files.adapter_fit import read_for_model
from ...engine.files.model_config import ModelConfig
from ...engine.files.moe_config import MoeConfig
from ...engine.files.tensor_files import StoredTensor
from ...engine.lora import Adapter
from ...kernels.ops.lora import Adapted, LoraWeights
from ...kernels.ops.projection import Projection
from .device import Device
from .mapped import MappedFiles

PROJECTIONS = 5  # at most so many of a layer besides experts, with q, k and v as one
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
    in main memory. The slots take no memory until the first adapter is prepared.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        values: int,
        device: Device,
        dtype: torch.dtype,
        base: Mapping[str, StoredTensor] = MappingProxyType({}),
    ) -> None:
        """`values`: the size of one slot in numbers (see `slot_values`). `base`: the tensors in the files of the
        model."""
        self.count = count
        self.rank = rank
        self.tied_embedding = ""  # name of the embedding that is also the output head
        self._base = base
        self._values = values
        self._memory = device.slot_memory(device)
        self._dtype = dtype
        self._modules: dict[str, Module] = {}
        self._prepared: dict[Adapter, Tensor] = {}
        self._placed = 0  # number of values in each slot that belong to a module
        self._pool: Tensor | None = None  # the slots [count + 1, values]; None: not allocated
        self._factors: list[tuple[int, Tensor]] = []  # for each factor: its first value in a slot, and its tensor
        self._blank = torch.zeros(1, dtype=dtype, device=device.type)  # value of all factors before the allocation
        self._allocating = Lock()  # several threads may prepare adapters

    def limit(self, count: int) -> int:
        """Reduce the number of slots to at most `count`, before the first adapter is prepared. Returns the number."""
        self.count = min(self.count, count)
        return self.count

    def adapt(self, names: Sequence[str], widths: Sequence[int], in_features: int, base: Projection) -> Projection:
        """`base`, the projection that merges these modules, with buffers for their LoRA factors. `base` unchanged if
        there are no adapter slots."""
        if not self.count:
            return base
        return Adapted(base, self._place(names, widths, in_features))

    def embedding(self, name: str, vocab: int, width: int) -> LoraWeights | None:
        """Buffers for the LoRA factors of the embedding. None: there are no adapter slots."""
        return self._place([name], [width], vocab) if self.count else None

    def prepare(self, adapter: Adapter) -> None:
        """Read the adapter's files to main memory. Raises ModelRefused if the adapter does not fit the model, and the
        errors of torch if the memory is full."""
        if adapter in self._prepared:
            return
        shapes = {name: (module.out_features, module.in_features) for name, module in self._modules.items()}
        files = read_for_model(adapter, shapes, self.rank, self._base, self.tied_embedding)
        self._allocate()
        values = self._memory.buffer(self._values, self._dtype)
        maps = MappedFiles()
        for name, factors in files.factors.items():
            module = self._modules[name]
            rank = factors.rank
            _copy_finite(module.a(values)[:rank], _matrix(maps, factors, factors.a), name)
            _copy_finite(module.b(values)[:, :rank], _matrix(maps, factors, factors.b) * factors.scale, name)
        self._prepared[adapter] = values

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copy a prepared adapter into a slot that no step reads. Steps may run meanwhile."""
        assert self._pool is not None, "a prepared adapter has allocated the slots"
        self._memory.copy(self._pool[slot], self._prepared[adapter])

    def forget(self, adapter: Adapter) -> None:
        """Free the main memory of a prepared adapter."""
        self._prepared.pop(adapter, None)

    @contextmanager
    def imitated(self) -> Iterator[None]:
        """A context in which steps can use slot 1 before the slots are allocated. Slots 0 and 1 of all factors are the
        same zeros, with the memory of two slots of the largest factor."""
        sizes = [factor[0].numel() for _, factor in self._factors]
        zeros = torch.zeros(2 * max(sizes, default=0), dtype=self._dtype, device=self._blank.device)
        for (_, factor), size in zip(self._factors, sizes, strict=True):
            _place_at(factor, zeros[: 2 * size].view(2, *factor.shape[1:]))
        try:
            yield
        finally:
            for _, factor in self._factors:
                _place_at(factor, self._blank.expand(self.count + 1, *factor.shape[1:]))

    def _allocate(self) -> None:
        """Allocate the slots, and make the factors views of them, unless that was done before."""
        with self._allocating:
            if self._pool is not None:
                return
            pool = self._memory.allocate(self.count + 1, self._values, self._dtype)
            for start, factor in self._factors:
                size = factor[0].numel()
                _place_at(factor, pool[:, start : start + size].unflatten(1, factor.shape[1:]))
            self._pool = pool

    def _place(self, names: Sequence[str], widths: Sequence[int], in_features: int) -> LoraWeights:
        """The factors of a projection. They have the place of the next values of each slot, and get it when the slots
        are allocated."""
        outputs = sum(widths)
        start = self._placed
        a = self._factor(start, len(names) * self.rank, in_features)
        b = self._factor(start + a[0].numel(), outputs, self.rank)
        end = start + a[0].numel() + b[0].numel()
        assert end <= self._values, "slot_values counts too little for this model"
        self._placed = -(-end // ALIGNED) * ALIGNED
        weights = LoraWeights(a, b, tuple(widths))
        for index, name in enumerate(names):
            self._modules[name] = Module(weights, start, index, in_features)
        return weights

    def _factor(self, start: int, rows: int, columns: int) -> Tensor:
        """A factor [slots, rows, columns] without memory of its own, for the values of each slot from `start`."""
        factor = self._blank.expand(self.count + 1, rows, columns)
        self._factors.append((start, factor))
        return factor


def _place_at(factor: Tensor, place: Any) -> None:
    """Make a factor a view of the memory of the tensor `place`."""
    factor.set_(place)


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


def slot_values(config: ModelConfig, rank: int) -> int:
    """Number of values in one slot: factors of rank `rank` for all linear layers except experts, the embedding and the
    output head."""
    if config.linear is not None:
        return rank * config.linear.values + config.linear.count * ALIGNED
    hidden = config.hidden_size
    factor = config.layers.shared_mlp_factor if config.layers else 1
    dense = _mlp_values(hidden, factor * config.intermediate_size)
    total = 2 * (config.vocab_size + hidden) + len(config.attention_layers) * _attention_values(config)
    projections = PROJECTIONS * config.num_layers + 2
    if config.recurrent is not None:
        total += len(config.state_layers) * config.recurrent.adapter_values(hidden)
    has_experts = config.moe.layers if config.moe else (False,) * config.num_layers
    for layer in has_experts:
        total += _routed_values(hidden, config.moe) if layer and config.moe else dense
        total += dense if layer and config.layers else 0  # beside the experts
        projections += 2 if layer else 0
    if config.layers and config.layers.input_dim:
        inputs = config.num_layers * config.layers.input_dim
        total += hidden + inputs + 2 * (config.num_layers * hidden + inputs)
        projections += 2 * config.num_layers + 1
    return rank * total + projections * ALIGNED


def _attention_values(config: ModelConfig) -> int:
    """Numbers of the factors of rank 1 of the attention of a layer."""
    hidden = config.hidden_size
    if config.latent is not None:
        latent = config.latent
        queries = config.num_heads * latent.head_dim
        inputs = 2 * hidden + latent.down_features(config.num_heads)
        values = config.num_heads * latent.value_dim
        return inputs + latent.query_rank + (queries if latent.query_rank else 0) + values + hidden
    heads = config.num_heads * config.largest_head_dim
    kv_heads = config.num_kv_heads * config.largest_head_dim
    return 3 * hidden + config.query_parts * heads + 2 * kv_heads + heads + hidden


def _mlp_values(hidden: int, inner: int) -> int:
    """Numbers of the factors of rank 1 of a dense MLP."""
    return 2 * (hidden + inner) + inner + hidden


def _routed_values(hidden: int, moe: MoeConfig) -> int:
    """Numbers of the factors of rank 1 of a router, and of a shared expert with its gate."""
    router = hidden + moe.experts
    return router + _mlp_values(hidden, moe.shared_size) + hidden + 1 if moe.shared_size else router
