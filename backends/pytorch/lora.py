"""The adapter slots of a model: the LoRA factors of every projection, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...engine.adapterfiles import AdapterFiles, Factors, read_adapter
from ...engine.errors import ModelRefused
from ...engine.lora import Adapter
from ...engine.modelconfig import ModelConfig
from ...engine.tensorfiles import StoredTensor
from ...kernels.ops.lora import LoraWeights
from ...kernels.ops.projection import Adapted, Projection
from .mapped import MappedFiles


@dataclass(frozen=True, slots=True)
class Module:
    """The place of one module of the model in the factors of its projection."""

    weights: LoraWeights
    index: int  # of the slice
    in_features: int

    @property
    def out_features(self) -> int:
        return self.weights.widths[self.index]

    def a(self, slot: int) -> Tensor:
        """[rank, in_features] of one slot."""
        factors: Tensor = self.weights.a[slot].split(self.weights.rank)[self.index]
        return factors

    def b(self, slot: int) -> Tensor:
        """[out_features, rank] of one slot."""
        factors: Tensor = self.weights.b[slot].split(self.weights.widths)[self.index]
        return factors


class AdapterSlots:
    """Slots 1…count for adapters of at most `rank`. Slot 0, the base model, stays zero."""

    def __init__(self, count: int, rank: int, device: str, dtype: torch.dtype) -> None:
        self.count = count
        self.rank = rank
        self.bytes = 0
        self._device = device
        self._dtype = dtype
        self._modules: dict[str, Module] = {}

    def adapt(self, names: Sequence[str], widths: Sequence[int], in_features: int, base: Projection) -> Projection:
        """The projection of these modules, with room for their factors. Without slots the projection itself."""
        if not self.count:
            return base
        return Adapted(base, self._allocate(names, widths, in_features))

    def embedding(self, name: str, vocab: int, width: int) -> LoraWeights | None:
        """Room for the factors of the embedding. None: there are no slots."""
        return self._allocate([name], [width], vocab) if self.count else None

    def load(self, slot: int, adapter: Adapter) -> None:
        """Read the adapter's files into the slot. Raises ModelRefused, with the slot empty, if it does not fit."""
        try:
            files = read_adapter(Path(adapter.path))
        except ModelRefused as error:
            raise ModelRefused(f"adapter {adapter.name}: {error}", error.hint) from error
        if files.version != adapter.version:
            raise ModelRefused(f"adapter {adapter.name}: its files have changed", "load the adapter again")
        self._check(adapter.name, files)
        maps = MappedFiles()
        for weights in {id(module.weights): module.weights for module in self._modules.values()}.values():
            weights.a[slot].zero_()
            weights.b[slot].zero_()
        for name, factors in files.factors.items():
            module = self._modules[name]
            rank = factors.rank
            module.a(slot)[:rank].copy_(_matrix(maps, factors, factors.a))
            module.b(slot)[:, :rank].copy_(_matrix(maps, factors, factors.b) * factors.scale)

    def _allocate(self, names: Sequence[str], widths: Sequence[int], in_features: int) -> LoraWeights:
        def zeros(*shape: int) -> Tensor:
            # numpy's zeros take no memory until they are written: on the CPU, slots that nobody uses cost nothing.
            size = math.prod(shape) * (self.count + 1)
            plain = torch.from_numpy(np.zeros(size * self._dtype.itemsize, np.uint8))
            return plain.view(self._dtype).view(self.count + 1, *shape).to(self._device)

        weights = LoraWeights(zeros(len(names) * self.rank, in_features), zeros(sum(widths), self.rank), tuple(widths))
        self.bytes += weights.a.nbytes + weights.b.nbytes
        for index, name in enumerate(names):
            self._modules[name] = Module(weights, index, in_features)
        return weights

    def _check(self, name: str, files: AdapterFiles) -> None:
        if files.rank > self.rank:
            raise ModelRefused(
                f"adapter {name}: rank {files.rank}, but the limit is {self.rank}",
                f"load the model with adapter_rank={files.rank} or more",
            )
        for module, factors in files.factors.items():
            place = self._modules.get(module)
            if place is None:
                raise ModelRefused(f"adapter {name}: the model has no module {module!r:.200}")
            actual = factors.out_features, factors.in_features
            expected = place.out_features, place.in_features
            if actual != expected:
                raise ModelRefused(
                    f"adapter {name}: {module} is {actual[0]} x {actual[1]}, but in the model {expected[0]} x "
                    f"{expected[1]}; the adapter is for another base model"
                )


def _matrix(maps: MappedFiles, factors: Factors, stored: StoredTensor) -> Tensor:
    """A factor as float32, [rank, in_features] or [out_features, rank]. Raises ModelRefused for NaN or infinity."""
    tensor = maps.tensor(stored).float()
    if not tensor.isfinite().all():
        raise ModelRefused(f"{stored.file.name}: a LoRA factor contains NaN or infinity")
    return tensor.T if factors.transposed else tensor


def pool_bytes(config: ModelConfig, count: int, rank: int, itemsize: int) -> int:
    """Bytes of `count` slots for all modules of a model."""
    hidden = config.hidden_size
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    sizes = [(hidden, heads), (hidden, kv_heads), (hidden, kv_heads), (heads, hidden)]
    sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layer = sum(in_features + out_features for in_features, out_features in sizes)
    ends = 2 * (config.vocab_size + hidden)  # embedding and output head
    slots = count + 1 if count else 0
    return slots * rank * itemsize * (config.num_layers * layer + ends)
