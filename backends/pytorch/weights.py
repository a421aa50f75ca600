"""Reads weights from safetensors files by name and exact shape. A tensor that the model does not read is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.modelfiles import ModelFiles
from ...engine.tensorfiles import StoredTensor
from ...kernels.ops.layer import DecoderLayer
from ...kernels.ops.linear import Weight, map_tensors
from ...kernels.ops.projection import Product, Projection, SideBySide
from .device import Device
from .lora import AdapterSlots
from .mapped import MappedFiles
from .quant import SLICE_VALUES, Loaded, Scheme, memory_bytes, slices
from .quant.floats import STORED, check_finite

# Buffers in the files of old exporters. They are computed from config.json instead.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class StoredTensors:
    """The tensors of a model's files, memory-mapped. Each may be read once."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._left = dict(files.tensors)
        self._maps = MappedFiles()
        self._read: list[StoredTensor] = []

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def dtype(self, name: str) -> str:
        return self._left[name].dtype if name in self._left else ""

    def shape(self, name: str) -> tuple[int, ...]:
        return self._left[name].shape if name in self._left else (0,)

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> Tensor:
        stored = self.pass_over(name, shape, dtypes)
        self._read.append(stored)
        return self._maps.tensor(stored)

    def pass_over(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> StoredTensor:
        """Check and mark a tensor as `read` does, without reading its data."""
        stored = self._left.pop(name, None)
        if stored is None:
            raise ModelRefused(f"{self._files.name}: tensor {name!r} is missing, expected {list(shape)}")
        where = f"{stored.file.name}: tensor {name!r}"
        if stored.shape != tuple(shape):
            raise ModelRefused(f"{where} must be {list(shape)} (config.json), not {list(stored.shape)}")
        if stored.dtype not in dtypes:
            kinds = dtypes[0] if len(dtypes) == 1 else f"one of {', '.join(dtypes)}"
            raise ModelRefused(f"{where} must be {kinds}, not {stored.dtype}")
        return stored

    def put_back(self, name: str) -> None:
        """Allow the tensor to be read once more."""
        self._left[name] = self._files.tensors[name]

    def drop_pages(self) -> None:
        """Release the file pages of all tensors read so far. Their views stay valid: an access reads the file again."""
        for stored in self._read:
            self._maps.drop(stored)

    def forget_read(self) -> None:
        """Release the pages of all tensors read so far, for the last time: their views are not used again."""
        self.drop_pages()
        self._read.clear()

    def close(self) -> None:
        """Raises ModelRefused if a tensor was not read: the files are of another model."""
        unexpected = sorted(name for name in self._left if not _DERIVED.search(name))
        if unexpected:
            first = unexpected[0]
            raise ModelRefused(
                f"{self._left[first].file.name}: {len(unexpected)} tensors are not part of "
                f"{self._files.config.model_type}, the first is {first!r:.200}"
            )


class Weights:
    """The weights of a model under construction. The device packs the weights of products slice by slice. The file
    pages of a slice are released after it, so memory never has two copies of a weight.

    `kept` has products that are packed already, by the names of their projections joined with "+".
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Device,
        dtype: torch.dtype,
        scheme: Scheme,
        kept: Mapping[str, Product] = MappingProxyType({}),
        slots: AdapterSlots | None = None,
    ) -> None:
        self.dtype = dtype  # of activations
        self.products: dict[str, Product] = {}  # all products so far, named as in `kept`
        self.bytes = 0  # of all weights so far
        self.token_bytes = 0  # bytes that a decode step reads: all weights except the embedding table
        self._files = files
        self._device = device
        self._scheme = scheme
        self._kept = kept
        self._tensors = StoredTensors(files)
        self.slots = slots or AdapterSlots(0, 0, device.type, dtype)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A small tensor, copied to the device in its stored dtype. Raises ModelRefused if its shape is not `shape`."""
        tensor = self._tensors.read(name, shape, STORED)
        check_finite(name, tensor)
        self.bytes += tensor.nbytes
        self.token_bytes += tensor.nbytes
        return tensor.to(self._device.type, copy=True)

    def embedding(self, name: str, shape: Sequence[int]) -> Tensor:
        """The embedding table in its stored dtype. On the CPU it stays memory-mapped: only the rows in use are read."""
        tensor = self._tensors.read(f"{name}.weight", shape, STORED)
        for part in tensor.split(max(1, SLICE_VALUES // max(1, shape[1]))):
            check_finite(f"{name}.weight", part)
            self._tensors.drop_pages()
        self._tensors.forget_read()
        self.bytes += tensor.nbytes
        return tensor.to(self._device.type)

    def linear(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool = False
    ) -> Projection:
        """One projection, or several with the same input side by side, as one product if their formats allow it."""
        base = self._linear(names, out_features, in_features, bias)
        return self.slots.adapt(names, out_features, in_features, base)

    def _linear(self, names: Sequence[str], out_features: Sequence[int], in_features: int, bias: bool) -> Projection:
        sizes = list(zip(names, out_features, strict=True))
        biases = [self.take(f"{name}.bias", (out,)).float() for name, out in sizes] if bias else []
        packed = self._kept.get("+".join(names))
        if packed is not None:
            for name, out in sizes:
                self._tensors.pass_over(f"{name}.weight", (out, in_features), STORED)
            return self._product(names, packed.op, packed.weight, biases)
        loaded = [self._scheme.load(self._tensors, name, out, in_features) for name, out in sizes]
        if self._scheme.zero_biases and not bias:
            for name, out in sizes:
                self._pass_over_zeros(f"{name}.bias", out)
        if all(loaded[0].joins(other) for other in loaded[1:]):
            return self._pack(names, loaded, biases)
        alone = [[shift] for shift in biases] or [[]] * len(names)
        parts = zip(names, loaded, alone, strict=True)
        return SideBySide(tuple(self._pack([name], [one], shift) for name, one, shift in parts))

    def tied_head(self, embedding: str, head: str, out_features: int, in_features: int) -> Projection:
        """The output head with the weight of the embedding. Raises ModelRefused if the files have a different head."""
        self._tensors.put_back(f"{embedding}.weight")
        if f"{head}.weight" in self._tensors:
            copy, original = (
                self._tensors.read(f"{name}.weight", (out_features, in_features), STORED) for name in (head, embedding)
            )
            if not self._equal(copy, original):
                raise ModelRefused(
                    f"{self._files.name}: {head}.weight differs from the embedding, contrary to tie_word_embeddings"
                )
            self._tensors.put_back(f"{embedding}.weight")
        base = self._linear([embedding], [out_features], in_features, bias=False)
        return self.slots.adapt([head], [out_features], in_features, base)

    def prepare(self, layer: DecoderLayer) -> Any:
        """The argument of the device's op `layer.decoder` for this layer."""
        return self._device.ops.layer.prepare(layer)

    def prepare_stack(self, layers: Sequence[Any]) -> Any:
        """The argument of the device's op `layer.decoders`, from the results of `prepare` for all layers."""
        return self._device.ops.layer.prepare_stack(layers)

    def close(self) -> None:
        """Raises ModelRefused if the files have tensors that the model did not read."""
        self._tensors.close()

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Whether two large tensors of one shape have equal values, in any dtypes."""
        wider = torch.promote_types(one.dtype, other.dtype)
        rows = max(1, SLICE_VALUES // max(1, one.shape[1]))
        for left, right in zip(one.split(rows), other.split(rows), strict=True):
            if not torch.equal(left.to(wider), right.to(wider)):
                return False
            self._tensors.drop_pages()
        return True

    def _pass_over_zeros(self, name: str, size: int) -> None:
        if name in self._tensors and self._tensors.read(name, (size,), STORED).any():
            self._tensors.put_back(name)  # `close` refuses it: the model has no such bias

    def _pack(self, names: Sequence[str], loaded: Sequence[Loaded], biases: Sequence[Tensor]) -> Product:
        first = loaded[0]
        out_features = sum(one.out_features for one in loaded)
        packed = self._device.ops.linear.pack_slices(self._sent(loaded), out_features, self.dtype)
        self._tensors.forget_read()
        return self._product(names, first.product, packed, biases, first.order)

    def _sent(self, loaded: Sequence[Loaded]) -> Iterator[Weight]:
        """Slices of the weight on the device."""
        for plain in slices(loaded):
            yield map_tensors(plain, lambda part: part.to(self._device.type))
            self._tensors.drop_pages()

    def _product(
        self, names: Sequence[str], product: str, weight: Any, biases: Sequence[Tensor], order: Tensor | None = None
    ) -> Product:
        device = self._device.type
        placed = map_tensors(weight, lambda part: part.to(device))
        bias = torch.cat(list(biases)) if biases else None
        result = Product(product, placed, bias, None if order is None else order.to(device))
        self.products["+".join(names)] = result
        self.bytes += memory_bytes(placed)
        self.token_bytes += memory_bytes(placed)
        return result
