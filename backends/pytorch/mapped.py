"""Maps weight files into memory. The system reads a page of a file at its first access; `drop` releases pages."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from ...engine.errors import ModelRefused
from ...engine.files.tensor_files import StoredTensor

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)


class MappedFiles:
    """Safetensors files. Each is mapped when its first tensor is read."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor, as a view of the mapped file. The file stays mapped while the view exists. Do not write to the
        view."""
        dtype = DTYPES[stored.dtype]
        count = math.prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        mapped = self._map(stored.file)
        if stored.start % dtype.itemsize == 0:
            return torch.frombuffer(mapped, dtype=dtype, count=count, offset=stored.start).view(stored.shape)
        copy = bytearray(mapped[stored.start : stored.stop])  # a copy, because torch needs aligned elements
        return torch.frombuffer(copy, dtype=dtype).view(stored.shape)

    def drop(self, stored: StoredTensor) -> None:
        """Release the pages of a tensor from the memory of this process. A later access reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._advise(stored, mmap.MADV_DONTNEED)

    def _advise(self, stored: StoredTensor, advice: int) -> None:
        start = stored.start - stored.start % mmap.PAGESIZE
        # KeyError: the file is not mapped. OSError: the system does not support the advice.
        with suppress(KeyError, OSError):
            self._maps[stored.file].madvise(advice, start, stored.stop - start)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as opened:  # ACCESS_COPY, because torch needs writable memory
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise ModelRefused(f"{file.name} cannot be read: {error}") from error
        return self._maps[file]
