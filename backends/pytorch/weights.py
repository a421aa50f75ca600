"""Weights out of safetensors files: each asked for by name and shape, nothing padded, cut or passed over."""

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
from ...kernels.ops.linear import Weight, changed
from ...kernels.ops.projection import Product, Projection, SideBySide
from .device import Device
from .mapped import MappedFiles
from .quant import AT_ONCE, Loaded, Scheme, held_bytes, slices
from .quant.floats import STORED, check_finite

# Buffers that old exports carry along; they follow from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class StoredTensors:
    """The tensors of a model's files, memory-mapped; each is taken once."""

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
        """Take it as `read` does, but leave its data in the file."""
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
        """It may be taken once more."""
        self._left[name] = self._files.tensors[name]

    def drop_pages(self) -> None:
        """What was touched so far has been copied: its part of the files need not stay in memory."""
        for stored in self._read:
            self._maps.drop(stored)

    def forget_read(self) -> None:
        """Nothing that was read so far will be touched again."""
        self.drop_pages()
        self._read.clear()

    def close(self) -> None:
        """Every tensor must have been taken: one left over means that these are another model's files."""
        unexpected = sorted(name for name in self._left if not _DERIVED.search(name))
        if unexpected:
            first = unexpected[0]
            raise ModelRefused(
                f"{self._left[first].file.name}: {len(unexpected)} tensors are not part of "
                f"{self._files.config.model_type}, the first is {first!r:.200}"
            )


class Weights:
    """What a model file builds itself from. Weights of products are packed by the device, a number of outputs at a
    time, and the files' pages let go after each: there are never two copies of a weight, however large it is.

    Products that are in `kept`, by the names of what they are made of, are taken from there.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Device,
        dtype: torch.dtype,
        scheme: Scheme,
        kept: Mapping[str, Product] = MappingProxyType({}),
    ) -> None:
        self.dtype = dtype  # of activations
        self.products: dict[str, Product] = {}  # all so far, by the same names as in `kept`
        self.bytes = 0  # of everything so far
        self.token_bytes = 0  # of that, what one token reads: all but rows of the embedding
        self._files = files
        self._device = device
        self._scheme = scheme
        self._kept = kept
        self._tensors = StoredTensors(files)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A small tensor as it is stored, copied to the device; it must have exactly this shape."""
        found = self._tensors.read(name, shape, STORED)
        check_finite(name, found)
        self.bytes += found.nbytes
        self.token_bytes += found.nbytes
        return found.to(self._device.type, copy=True)

    def embedding(self, name: str, shape: Sequence[int]) -> Tensor:
        """As stored and, where the device computes from main memory, left in the file: only rows in use are read."""
        found = self._tensors.read(f"{name}.weight", shape, STORED)
        for some in found.split(max(1, AT_ONCE // max(1, shape[1]))):
            check_finite(f"{name}.weight", some)
            self._tensors.drop_pages()
        self._tensors.forget_read()
        self.bytes += found.nbytes
        return found.to(self._device.type)

    def linear(self, names: Sequence[str], outs: Sequence[int], ins: int, bias: bool = False) -> Projection:
        """One projection, or several with the same input side by side, as one product where their formats allow it."""
        sizes = list(zip(names, outs, strict=True))
        biases = [self.take(f"{name}.bias", (out,)).float() for name, out in sizes] if bias else []
        kept = self._kept.get("+".join(names))
        if kept is not None:
            for name, out in sizes:
                self._tensors.pass_over(f"{name}.weight", (out, ins), STORED)
            return self._product(names, kept.op, kept.weight, biases)
        loaded = [self._scheme.load(self._tensors, name, out, ins) for name, out in sizes]
        if self._scheme.zero_biases and not bias:
            for name, out in sizes:
                self._pass_over_zeros(f"{name}.bias", out)
        if all(loaded[0].joins(other) for other in loaded[1:]):
            return self._pack(names, loaded, biases)
        alone = [[shift] for shift in biases] or [[]] * len(names)
        parts = zip(names, loaded, alone, strict=True)
        return SideBySide(tuple(self._pack([name], [one], shift) for name, one, shift in parts))

    def tied_head(self, embedding: str, head: str, outs: int, ins: int) -> Projection:
        """The head whose weight is the embedding's; a second copy may be stored, if it is a copy."""
        self._tensors.put_back(f"{embedding}.weight")
        if f"{head}.weight" in self._tensors:
            copy, original = (self._tensors.read(f"{name}.weight", (outs, ins), STORED) for name in (head, embedding))
            if not self._equal(copy, original):
                raise ModelRefused(
                    f"{self._files.name}: {head}.weight differs from the embedding, contrary to tie_word_embeddings"
                )
            self._tensors.put_back(f"{embedding}.weight")
        return self.linear([embedding], [outs], ins)

    def prepare(self, layer: DecoderLayer) -> Any:
        """The layer as the device's `layer.decoder` takes it."""
        return self._device.ops.layer.prepare(layer)

    def prepare_stack(self, layers: Sequence[Any]) -> Any:
        """All of a model's, each as `prepare` made it, as the device's `layer.decoders` takes them."""
        return self._device.ops.layer.prepare_stack(layers)

    def close(self) -> None:
        """Raises ModelRefused for tensors that the model did not ask for."""
        self._tensors.close()

    def _equal(self, one: Tensor, other: Tensor) -> bool:
        """Of two large tensors of one shape, whatever their types."""
        wider = torch.promote_types(one.dtype, other.dtype)
        some = max(1, AT_ONCE // max(1, one.shape[1]))
        for left, right in zip(one.split(some), other.split(some), strict=True):
            if not torch.equal(left.to(wider), right.to(wider)):
                return False
            self._tensors.drop_pages()
        return True

    def _pass_over_zeros(self, name: str, size: int) -> None:
        if name in self._tensors and self._tensors.read(name, (size,), STORED).any():
            self._tensors.put_back(name)  # to be refused as one that the model does not have

    def _pack(self, names: Sequence[str], loaded: Sequence[Loaded], biases: Sequence[Tensor]) -> Product:
        first = loaded[0]
        outs = sum(one.outs for one in loaded)
        packed = self._device.ops.linear.pack_slices(self._sent(loaded), outs, self.dtype)
        self._tensors.forget_read()
        return self._product(names, first.product, packed, biases, first.order)

    def _sent(self, loaded: Sequence[Loaded]) -> Iterator[Weight]:
        """Slice by slice, where the device computes."""
        for plain in slices(loaded):
            yield changed(plain, lambda part: part.to(self._device.type))
            self._tensors.drop_pages()

    def _product(
        self, names: Sequence[str], product: str, weight: Any, biases: Sequence[Tensor], order: Tensor | None = None
    ) -> Product:
        device = self._device.type
        held = changed(weight, lambda part: part.to(device))
        bias = torch.cat(list(biases)) if biases else None
        made = Product(product, held, bias, None if order is None else order.to(device))
        self.products["+".join(names)] = made
        self.bytes += held_bytes(held)
        self.token_bytes += held_bytes(held)
        return made
