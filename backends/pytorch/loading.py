"""Opening a model's weights on a device: how much memory they take, and whether they were made smaller before."""

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
from .quant import held_bytes
from .quant.choose import ON_LOAD, scheme
from .quant.floats import STORED
from .weights import Weights

WORTH_KEEPING = 64 * 2**20  # bytes as stored; less is made anew sooner than it is read
EMBEDDING = "model.embed_tokens.weight"
_SAMPLE = (64, 256)

Model = TypeVar("Model")


class Loader:
    """For one model, options and device; activations are of `dtype`. Raises ModelRefused for a format of weights that
    cannot be loaded."""

    def __init__(self, files: ModelFiles, options: LoadOptions, device: Device, dtype: torch.dtype) -> None:
        self._files = files
        self._device = device
        self._dtype = dtype
        self._quant = options.quant
        self._scheme = scheme(options.quant, files)
        self._packed: PackedFile | None = None
        if options.packed_dir is not None and self._quant != "none" and files.weight_bytes >= WORTH_KEEPING:
            sample = self._sample(torch.float32)
            mark = fingerprint(files, self._quant, sample)
            self._packed = PackedFile(options.packed_dir / f"{self._quant}.safetensors", mark, type(sample))

    def expected_bytes(self) -> int:
        """What the weights will take in memory, within a few percent."""

        @cache
        def share(stored: str) -> float:
            """Bytes held for each value of a weight stored so."""
            return held_bytes(self._sample(DTYPES[stored])) / prod(_SAMPLE)

        total = 0.0
        for name, tensor in self._files.tensors.items():
            packed = len(tensor.shape) == 2 and tensor.dtype in STORED
            head = name != EMBEDDING or self._files.config.tie_embeddings
            total += prod(tensor.shape) * share(tensor.dtype) if packed and head else 0
            total += tensor.num_bytes if not packed or name == EMBEDDING else 0
        return round(total)

    def load(self, build: Callable[[Weights], Model]) -> tuple[Model, Weights]:
        """What `build` makes of the weights, and what was taken. Raises ModelRefused for those that do not fit."""
        kept = None if self._packed is None else self._packed.read()
        weights = Weights(self._files, self._device, self._dtype, self._scheme, kept or {})
        model = build(weights)
        weights.close()
        if self._packed is not None and kept is None:
            self._packed.write(weights.products)
        return model, weights

    def _sample(self, stored: torch.dtype) -> Any:
        """A small weight, gone the way that every weight stored so goes."""
        plain = torch.linspace(-1.0, 1.0, prod(_SAMPLE)).view(_SAMPLE).to(stored)
        quantise = ON_LOAD[self._quant]
        weight = plain if quantise is None else quantise(plain)
        return self._device.ops.linear.pack(weight, self._dtype)
