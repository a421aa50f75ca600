"""Reads and validates the headers of safetensors files. Trusts no number in them.

    [ 8 bytes: header length ][ header: JSON, name -> dtype, shape, data_offsets ][ data, without holes ]

The format: https://github.com/huggingface/safetensors#format. This module reads no tensor data.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeGuard

from ..errors import ModelRefused
from . import json_text

MAX_HEADER = 25_000_000  # bytes; the limit of huggingface_hub. The format allows 100 MB, which no model needs
MAX_DIMENSIONS = 8
FLOATS = ("F32", "F16", "BF16")  # dtypes of the values that tensor_values.py reads

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64"), 8),
    }
)

_HINT = "the file is corrupt or incomplete: delete it and download the model again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The position of a tensor in its file, validated against the file size."""

    file: Path
    dtype: str  # name of the dtype, a key of ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # offset of the data in the file, in bytes
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def read_header(file: Path) -> Mapping[str, StoredTensor]:
    """Every tensor in the file. Raises ModelRefused with file, tensor, expected and actual value."""
    size = regular_size(file)
    with refusing_unreadable(file), file.open("rb") as stream:
        raw = _read_raw_header(file, stream, size)
    return parse_header(file, raw, size)


def header_length(file: Path, prefix: bytes, size: int) -> int:
    """Bytes of the header after the prefix: the first 8 bytes of a file of `size` bytes. Raises ModelRefused."""
    if len(prefix) < 8:
        raise _corrupt(file, f"it has {size} bytes; the minimum is 8")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER, size - 8):
        raise _corrupt(file, f"its header needs {length} bytes, the file has {size}")
    return length


def parse_header(file: Path, raw: bytes, size: int) -> Mapping[str, StoredTensor]:
    """Every tensor in a file of `size` bytes whose header is `raw`. Raises ModelRefused as read_header does."""
    header = _parse(file, raw)
    header.pop("__metadata__", None)
    base = 8 + len(raw)
    tensors = {name: _read_entry(file, name, entry, base) for name, entry in header.items()}
    _check_layout(file, tensors, base, size)
    return tensors


def regular_size(file: Path) -> int:
    """Bytes of a file. Raises ModelRefused for a pipe, a folder or a missing file."""
    with refusing_unreadable(file):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelRefused(f"{file.name} is not a regular file")
    return status.st_size


@contextmanager
def refusing_unreadable(file: Path) -> Iterator[None]:
    """Raises ModelRefused instead of OSError."""
    try:
        yield
    except OSError as error:
        raise ModelRefused(f"{file.name} cannot be read: {error.strerror or error}") from error


def _read_raw_header(file: Path, stream: BinaryIO, size: int) -> bytes:
    return stream.read(header_length(file, stream.read(8), size))


def _corrupt(file: Path, reason: str) -> ModelRefused:
    return ModelRefused(f"{file.name} is not a valid safetensors file: {reason}", _HINT)


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise _corrupt(file, "its header has a duplicate name")
        return entries

    try:
        header = json_text.parse(raw, unique)
    except ValueError as error:
        raise _corrupt(file, f"its header is {error}") from error
    if not isinstance(header, dict):
        raise _corrupt(file, f"its header is a {type(header).__name__}, not an object")
    return header


def _read_entry(file: Path, name: str, entry: object, base: int) -> StoredTensor:
    """Validate one entry of the header. `base`: offset of the data in the file."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(file, f"tensor {name!r} must have dtype, shape and data_offsets, not {entry!r:.200}")
    dtype = entry["dtype"]
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise _corrupt(file, f"tensor {name!r} has an unknown dtype: {dtype!r:.50}")
    shape = entry["shape"]
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _corrupt(file, f"tensor {name!r} has an invalid shape: {shape!r:.200}")
    offsets = entry["data_offsets"]
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _corrupt(file, f"tensor {name!r} has invalid data_offsets: {offsets!r:.200}")
    start, stop = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    actual = stop - start
    if expected != actual:
        raise _corrupt(file, f"tensor {name!r}, {dtype} {shape}, needs {expected} bytes, but has {actual}")
    return StoredTensor(file, dtype, tuple(shape), base + start, base + stop)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """True for a list of integers that fit 63 bits."""
    if type(values) is not list or not {*map(type, values)} <= {int}:
        return False
    return min(values, default=0) >= 0 and max(values, default=0) < 2**63


def _check_layout(file: Path, tensors: Mapping[str, StoredTensor], base: int, size: int) -> None:
    """Refuse tensors that overlap, and bytes of the file that belong to no tensor."""
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        start = f"tensor {name!r} starts at byte {tensor.start}, expected {end}"
        if tensor.start < end:
            raise _corrupt(file, f"{start}: it overlaps the tensor before it")
        if tensor.start > end:
            raise _corrupt(file, f"{start}: it leaves a gap before it")
        end = tensor.stop
    if end != size:
        raise _corrupt(file, f"its tensors end at byte {end}, but the file has {size} bytes")
