"""Loads the weights of a model on a device: estimates their memory, and reads or writes the packed file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any, TypeVar

import torch

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from .device import Device
from .mapped import DTYPES
from .packed import PackedFile, fingerprint
from .quant import memory_bytes
from .quant.choose import ON_LOAD, scheme
from .quant.floats import STORED
from .weights import Weights

MIN_PACKED_BYTES = 64 * 2**20  # bytes as stored; a smaller model is quantised faster than its packed file is read
EMBEDDING = "model.embed_tokens.weight"
_SAMPLE = (64, 256)

Model = TypeVar("Model")


class Loader:
    """Loads the weights of one model with these options on one device, for activations of `dtype`. Raises ModelRefused
    for an unsupported weight format."""

    def __init__(self, files: ModelFiles, options: LoadOptions, device: Device, dtype: torch.dtype) -> None:
        self._files = files
        self._device = device
        self._dtype = dtype
        self._quant = options.quant
        self._scheme = scheme(options.quant, files)
        self._packed: PackedFile | None = None
        if options.packed_dir is not None and self._quant != "none" and files.weight_bytes >= MIN_PACKED_BYTES:
            sample = self._sample(torch.float32)
            mark = fingerprint(files, self._quant, sample)
            self._packed = PackedFile(options.packed_dir / f"{self._quant}.safetensors", mark, type(sample))

    def expected_bytes(self) -> int:
        """Estimated bytes of the loaded weights, correct within a few percent."""

        @cache
        def share(stored: str) -> float:
            """Bytes in memory per value of a weight stored as this dtype."""
            return memory_bytes(self._sample(DTYPES[stored])) / prod(_SAMPLE)

        total = 0.0
        for name, tensor in self._files.tensors.items():
            packed = len(tensor.shape) == 2 and tensor.dtype in STORED
            head = name != EMBEDDING or self._files.config.tie_embeddings
            if packed and head:
                total += prod(tensor.shape) * share(tensor.dtype)
            if not packed or name == EMBEDDING:
                total += tensor.num_bytes
        return round(total)

    def load(self, build: Callable[[Weights], Model]) -> tuple[Model, Weights]:
        """The model that `build` returns, and its weights. Raises ModelRefused if the weights do not fit the model."""
        products = None if self._packed is None else self._packed.read()
        weights = Weights(self._files, self._device, self._dtype, self._scheme, products or {})
        model = build(weights)
        weights.close()
        if self._packed is not None and products is None:
            self._packed.write(weights.products)
        return model, weights

    def _sample(self, stored: torch.dtype) -> Any:
        """A small weight of dtype `stored`, quantised and packed as all weights of this dtype."""
        plain = torch.linspace(-1.0, 1.0, prod(_SAMPLE)).view(_SAMPLE).to(stored)
        quantise = ON_LOAD[self._quant]
        weight = plain if quantise is None else quantise(plain)
        return self._device.ops.linear.pack(weight, self._dtype)
