"""Headers of safetensors files, read and checked without trusting a number in them.

    [ 8 bytes: header length ][ header: JSON, name -> dtype, shape, data_offsets ][ data, without holes ]

The format: https://github.com/huggingface/safetensors#format. Nothing here reads tensor data.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ModelRefused

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_DIMENSIONS = 8

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64"), 8),
    }
)

_HINT = "the file is damaged or incomplete: remove it and download the model again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, as its file's header says; checked against the file's size."""

    file: Path
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path) -> Mapping[str, StoredTensor]:
    """Every tensor in the file. Raises ModelRefused naming file, tensor, what was expected and what was found."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelRefused(f"{file.name} is not a regular file")
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise _damaged(file, f"it has {status.st_size} bytes; even an empty one has more than 8")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER, status.st_size - 8):
                raise _damaged(file, f"its header should have {length} bytes, the file has {status.st_size}")
            raw = stream.read(length)
    except OSError as error:
        raise ModelRefused(f"{file.name} cannot be read: {error.strerror or error}") from error
    header = _parse(file, raw)
    base = 8 + length
    tensors = {name: _check_tensor(file, name, entry, base) for name, entry in header.items() if name != "__metadata__"}
    _check_layout(file, tensors, base, status.st_size)
    return tensors


def _damaged(file: Path, what: str) -> ModelRefused:
    return ModelRefused(f"{file.name} is not a sound safetensors file: {what}", _HINT)


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _damaged(file, "a name stands twice in its header")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, f"its header is a {type(header).__name__}, not an object")
    return header


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_tensor(file: Path, name: str, entry: object, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"tensor {name!r} should have dtype, shape and data_offsets, it has {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _damaged(file, f"tensor {name!r} has the unknown dtype {dtype!r:.50}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise _damaged(file, f"tensor {name!r} has the impossible shape {shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise _damaged(file, f"tensor {name!r} has the impossible data_offsets {offsets!r:.200}")
    expected, found = math.prod(shape) * ITEM_BYTES[dtype], offsets[1] - offsets[0]
    if expected != found:
        raise _damaged(file, f"tensor {name!r}, {dtype} {shape}, needs {expected} bytes, but has {found}")
    return StoredTensor(file, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _check_layout(file: Path, tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end:
            fault = "overlaps the one before it" if tensor.start < end else "leaves a hole before it"
            raise _damaged(file, f"tensor {name!r} begins at byte {tensor.start}, expected {end}: it {fault}")
        end = tensor.stop
    if end != size:
        raise _damaged(file, f"its tensors end at byte {end}, but the file has {size} bytes")
