"""Weights out of safetensors files: each asked for by name and shape, nothing padded, cut or passed over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.modelfiles import ModelFiles

STORED_DTYPES = ("BF16", "F16", "F32")

# Buffers that old exports carry along; they follow from config.json.
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class Weights:
    """The tensors of a model, memory-mapped, in the dtype and on the device asked for.

    A file already in that dtype on a CPU is used in place: its pages are read when they are first needed.
    """

    def __init__(self, files: ModelFiles, dtype: torch.dtype, device: str) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._left = dict(files.tensors)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor `name`; it must have exactly this shape. Each is taken once."""
        return self._read(name, tuple(shape)).to(self._device, self._dtype)

    def stack(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Several tensors one below the other, so that one product does the work of all."""
        parts = [self._read(name, tuple(shape)) for name, shape in zip(names, shapes, strict=True)]
        return torch.cat([part.to(self._device, self._dtype) for part in parts])

    def take_copy_of(self, name: str, original: Tensor) -> None:
        """A second copy of a tied weight may be stored, if it is a copy."""
        if name in self and not torch.equal(self.take(name, original.shape), original):
            raise ModelRefused(
                f"{self._files.name}: {name} should equal the embedding (tie_word_embeddings), but differs"
            )

    def close(self) -> None:
        """Every tensor must have been taken: one left over means that these are another model's files."""
        self._stack.close()
        unexpected = sorted(name for name in self._left if not _DERIVED.search(name))
        if unexpected:
            first = unexpected[0]
            raise ModelRefused(
                f"{self._left[first].file.name}: {len(unexpected)} tensors that {self._files.config.model_type} "
                f"does not have, the first is {first!r:.200}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._left.pop(name, None)
        if stored is None:
            raise ModelRefused(f"{self._files.name}: tensor {name!r} is missing, expected {list(shape)}")
        where = f"{stored.file.name}: tensor {name!r}"
        if stored.shape != shape:
            raise ModelRefused(f"{where} should be {list(shape)} by config.json, found {list(stored.shape)}")
        if stored.dtype not in STORED_DTYPES:
            raise ModelRefused(f"{where} should be one of {', '.join(STORED_DTYPES)}, found {stored.dtype}")
        try:
            if stored.file not in self._open:
                self._open[stored.file] = self._stack.enter_context(safe_open(stored.file, framework="pt"))
            tensor: Tensor = self._open[stored.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{where} cannot be read: {error}") from error
        return tensor
