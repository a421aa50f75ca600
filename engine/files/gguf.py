"""Reads and validates the headers of GGUF files. Trusts no number in them.

    [ magic, version, number of tensors, number of metadata entries ][ metadata ][ tensor directory ][ padding ][ data ]

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This module reads no tensor data. Like llama.cpp,
it refuses nested arrays and holes between tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ModelRefused
from .gguf_values import HeaderReader, Value
from .gguf_vocab import problem_of_texts, problem_of_vocabulary

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 2**17
MAX_ENTRIES = 2**14  # maximum number of metadata entries
MAX_KEY = 2**16 - 1  # bytes
MAX_NAME = 63  # bytes of a tensor name
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
INTEGER_TENSORS = ("ffn_gate_tid2eid.weight",)  # ends of names; experts of each token
FLOAT_TENSORS = ("norm.weight", ".bias")  # ends of names; llama.cpp computes with these tensors in F32 only
ALIGNMENT = 32  # bytes, if the metadata has no general.alignment

_COUNTS = struct.Struct("<IQQ")
_MIN_TENSOR = 8 + 4 + 4 + 8  # bytes of a directory entry without name and shape
_MIN_ENTRY = 8 + 1 + 4 + 1  # bytes of a metadata entry with the shortest key and value

# Type of a tensor -> (name, values in a block, bytes of a block). The types of intermediate results (Q8_1, Q8_K) and of
# other numbers (I8, I16, I64, F64) are left out: no weight has them, and llama.cpp crashes on a weight that does.
TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        26: ("I32", 1, 4),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }
)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The position of a tensor in its file, validated against the file size."""

    name: str
    dtype: str  # name of the type in TYPES
    shape: tuple[int, ...]  # the first dimension is contiguous
    start: int  # offset of the data in the file, in bytes
    stop: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The validated header of a GGUF file."""

    version: int
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]  # in the order of their data
    num_bytes: int  # bytes before the data


def parse_header(name: str, head: bytes, size: int) -> GgufHeader:
    """The header of the file `name`, which has `size` bytes and begins with `head`.

    Raises HeaderCut if `head` ends inside the header, and ModelRefused, with the entry and its value, for a header that
    no sound file of this size has.
    """
    reader = HeaderReader(name, head, size)
    if reader.take(4) != MAGIC:
        raise reader.corrupt("it does not begin with GGUF")
    version, num_tensors, num_entries = _COUNTS.unpack(reader.take(_COUNTS.size))
    if version not in VERSIONS:
        raise _wrong_version(name, version)
    reader.check_count("tensors", num_tensors, _MIN_TENSOR, MAX_TENSORS)
    reader.check_count("metadata entries", num_entries, _MIN_ENTRY, MAX_ENTRIES)
    metadata = _read_metadata(reader, num_entries)
    _check_vocabulary(reader, metadata)
    alignment = _alignment(reader, metadata)
    entries = _read_directory(reader, num_tensors)
    if not entries and "split.count" not in metadata:  # the first shard of a model may have metadata only
        raise reader.corrupt("it has no tensors")
    base = _padded(reader.position, alignment)
    return GgufHeader(version, metadata, _place(reader, entries, base, alignment), base)


def _wrong_version(name: str, version: int) -> ModelRefused:
    if version & 0xFFFF == 0:
        return ModelRefused(f"{name} is a big-endian GGUF file, which is not supported", "use a little-endian file")
    supported = " and ".join(map(str, VERSIONS))
    return ModelRefused(f"{name} has GGUF version {version}; supported: {supported}", "use another file of this model")


def _read_metadata(reader: HeaderReader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = reader.text(f"the key of metadata entry {index}", MAX_KEY)
        if not key:
            raise reader.corrupt(f"the key of metadata entry {index} is empty")
        if key in metadata:
            raise reader.corrupt(f"it has a duplicate key: {key!r:.100}")
        metadata[key] = reader.value(key, reader.u32())
    return metadata


def _check_vocabulary(reader: HeaderReader, metadata: Mapping[str, Value]) -> None:
    """Raises ModelRefused for a vocabulary with which llama.cpp ends its process."""
    problem = problem_of_texts(reader.tokens) or problem_of_vocabulary(
        metadata, frozenset(reader.tokens), reader.token_types
    )
    if problem:
        raise reader.corrupt(problem)


def _alignment(reader: HeaderReader, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", ALIGNMENT)
    is_power = type(value) is int and 0 < value <= MAX_ALIGNMENT and value & (value - 1) == 0
    if not is_power:
        raise reader.corrupt(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, not {value!r:.50}")
    assert isinstance(value, int)
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of the directory."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the data


def _read_directory(reader: HeaderReader, count: int) -> list[_Entry]:
    names: set[str] = set()
    entries = []
    for index in range(count):
        name = reader.text(f"the name of tensor {index}", MAX_NAME)
        if name in names:
            raise reader.corrupt(f"it has a duplicate tensor name: {name!r}")
        names.add(name)
        dimensions = reader.u32()
        if dimensions > MAX_DIMENSIONS:
            raise reader.corrupt(f"tensor {name!r} has {dimensions} dimensions; the limit is {MAX_DIMENSIONS}")
        shape = tuple(reader.u64() for _ in range(dimensions))
        entries.append(_Entry(name, shape, reader.u32(), reader.u64()))
    return entries


def _place(reader: HeaderReader, entries: list[_Entry], base: int, alignment: int) -> tuple[GgufTensor, ...]:
    """The tensors with their positions. `base`: offset of the data in the file."""
    tensors = []
    end = 0
    for entry in entries:
        dtype, num_bytes = _size(reader.corrupt, entry)
        if entry.offset != end:
            raise reader.corrupt(f"tensor {entry.name!r} starts at byte {entry.offset} of the data, expected {end}")
        start = base + entry.offset
        tensor = GgufTensor(entry.name, dtype, entry.shape, start, start + num_bytes)
        reader.check_end(tensor.name, tensor.stop)
        tensors.append(tensor)
        end = _padded(entry.offset + num_bytes, alignment)
    reader.check_rest(base + end)
    return tuple(tensors)


def _size(corrupt: Callable[[str], ModelRefused], entry: _Entry) -> tuple[str, int]:
    """(name of the type, bytes of the data) of a tensor."""
    if entry.kind not in TYPES:
        raise corrupt(f"tensor {entry.name!r} has the unknown type {entry.kind}")
    dtype, block_values, block_bytes = TYPES[entry.kind]
    if dtype == "I32" and not entry.name.endswith(INTEGER_TENSORS):
        raise corrupt(f"tensor {entry.name!r} has the type I32, which its weights cannot have")
    if dtype != "F32" and len(entry.shape) == 1 and entry.name.endswith(FLOAT_TENSORS):
        raise corrupt(f"tensor {entry.name!r} has the type {dtype}; norms and biases must have F32")
    values = math.prod(entry.shape)
    if max(entry.shape, default=0) >= 2**63 or values >= 2**63:
        raise corrupt(f"tensor {entry.name!r} has the shape {list(entry.shape)}, more than 2^63 - 1 values")
    row = entry.shape[0] if entry.shape else 1
    if row % block_values:
        raise corrupt(f"tensor {entry.name!r} has rows of {row} values, not a multiple of {block_values} ({dtype})")
    return dtype, values // block_values * block_bytes


def _padded(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment
