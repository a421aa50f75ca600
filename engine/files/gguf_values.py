"""Reads the values of a GGUF header. Every length is checked before it is used."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import ModelRefused

MAX_HEADER = 64 * 2**20  # bytes; the largest vocabularies need about 20 MB
MAX_STRINGS = 2**21  # in all arrays together; the largest vocabularies with their merges have about 800,000
MAX_TEXT = 2**20  # bytes of a text that the result has; a longer text becomes an Array
TOKENS = "tokenizer.ggml.tokens"  # the only array whose texts a HeaderReader keeps
TOKEN_TYPES = "tokenizer.ggml.token_type"
ALPHA = "adapter.lora.alpha"  # llama.cpp ends its process if it is not a 32-bit float
MAX_VALUES = 1024  # numbers of an array that the result has

UINT8 = 0  # types of values
INT8 = 1
INT32 = 5
FLOAT32 = 6
STRING = 8
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY = 9
_BOOL = 7
# Type of a metadata value -> its format. The formats of strings and arrays depend on their lengths.
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        _BOOL: struct.Struct("<B"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)

_HINT = "the file is corrupt or incomplete: delete it and download it again"


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the metadata, or a text above MAX_TEXT."""

    count: int
    values: tuple[int | float | bool, ...] = ()  # empty for strings, and for more than MAX_VALUES numbers
    kind: int = field(default=-1, compare=False)  # type of the items as in the file; -1: a text


Value = int | float | bool | str | Array


class HeaderCut(Exception):
    """The header is longer than the given part of it: `needed` is the minimum length of the part, in bytes."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        super().__init__(needed)


class HeaderReader:
    """Reads values from the beginning of a file. Every length is checked before it is used."""

    def __init__(self, name: str, head: bytes, size: int) -> None:
        self._name = name
        self._head = head
        self._size = size
        self._strings = 0  # number of array strings that were read
        self.position = 0
        self.tokens: list[bytes] = []  # the texts of the vocabulary
        self.token_types: frozenset[int] = frozenset()  # those of its tokens

    def corrupt(self, reason: str) -> ModelRefused:
        return ModelRefused(f"{self._name} is not a valid GGUF file: {reason}", _HINT)

    def check_count(self, things: str, count: int, item_bytes: int, limit: int) -> None:
        """Raises ModelRefused if `count` items of at least `item_bytes` bytes do not fit the rest of the file."""
        if count > limit:
            raise self.corrupt(f"it has {count} {things}; the limit is {limit}")
        if count * item_bytes > self._size - self.position:
            raise self.corrupt(f"it has {count} {things}, more than its {self._size} bytes can store")

    def skip(self, length: int) -> int:
        """Advance by `length` bytes. Returns the position before. Raises HeaderCut if the head ends before."""
        start = self.position
        stop = start + length
        if stop > self._size:
            raise self.corrupt(f"its header ends at byte {self._size}, but needs {stop}")
        if stop > MAX_HEADER:
            raise self.corrupt(f"its header has at least {stop} bytes; the limit is {MAX_HEADER}")
        if stop > len(self._head):
            raise HeaderCut(stop)
        self.position = stop
        return start

    def take(self, length: int) -> bytes:
        start = self.skip(length)
        return self._head[start : self.position]

    def u32(self) -> int:
        value: int = _U32.unpack_from(self._head, self.skip(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack_from(self._head, self.skip(8))[0]
        return value

    def check_end(self, tensor: str, stop: int) -> None:
        """Raises ModelRefused if the data of a tensor is not all in the file."""
        if stop > self._size:
            raise self.corrupt(f"tensor {tensor!r} ends at byte {stop}, but the file has {self._size} bytes")

    def check_rest(self, end: int) -> None:
        """Raises ModelRefused if the file has data after the last tensor and its padding."""
        if end < self._size:
            raise self.corrupt(f"its tensors end at byte {end}, but the file has {self._size} bytes")

    def text(self, what: str, limit: int) -> str:
        """A text of at most `limit` bytes."""
        length = self.u64()
        if length > limit:
            raise self.corrupt(f"{what} has {length} bytes; the limit is {limit}")
        return self._decode(what, length)

    def _decode(self, what: str, length: int) -> str:
        raw = self.take(length)
        if b"\0" in raw:  # C ends a text there, so that the file would have two meanings
            raise self.corrupt(f"{what} has a zero byte")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is not UTF-8: {raw!r:.100}") from None

    def value(self, key: str, kind: int) -> Value:
        if key == ALPHA and kind != FLOAT32:
            raise self.corrupt(f"{key} must be a 32-bit float")
        if kind == STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        form = _SCALARS.get(kind)
        if form is None:
            raise self.corrupt(f"{key!r:.100} has the unknown type {kind}")
        value: int | float = form.unpack_from(self._head, self.skip(form.size))[0]
        if kind != _BOOL:
            return value
        if value not in (0, 1):
            raise self.corrupt(f"{key!r:.100} must be true (1) or false (0), not {value}")
        return bool(value)

    def _string(self, key: str) -> str | Array:
        length = self.u64()
        if length > MAX_TEXT:
            self.skip(length)
            return Array(length)
        return self._decode(f"the value of {key!r:.100}", length)

    def _array(self, key: str) -> Array:
        kind = self.u32()
        count = self.u64()
        if kind == STRING:
            start = self.position
            self._skip_strings(key, count)
            if key == TOKENS:
                self.tokens = self._strings_from(start, count)
            return Array(count, kind=kind)
        form = _SCALARS.get(kind)
        if form is None:
            nested = " (arrays of arrays are not supported)" if kind == _ARRAY else ""
            raise self.corrupt(f"{key!r:.100} is an array of the unknown type {kind}{nested}")
        self.check_count(f"values of {key!r:.100}", count, form.size, MAX_HEADER)
        start = self.skip(count * form.size)
        if key == TOKEN_TYPES and kind == INT32:
            self.token_types = frozenset(struct.unpack_from(f"<{count}i", self._head, start))
        if count > MAX_VALUES:
            return Array(count, kind=kind)
        values = struct.unpack_from(f"<{count}{form.format[1:]}", self._head, start)
        return Array(count, tuple(map(bool, values)) if kind == _BOOL else values, kind)

    def _skip_strings(self, key: str, count: int) -> None:
        self._strings += count
        self.check_count(f"strings up to {key!r:.100}", self._strings, 0, MAX_STRINGS)
        self.check_count(f"strings of {key!r:.100}", count, 8, MAX_STRINGS)
        head = self._head
        unpack = _U64.unpack_from
        limit = len(head) - 8
        position = self.position
        # This loop has no calls of methods: a vocabulary has a million strings.
        while count and position <= limit:
            position += 8 + unpack(head, position)[0]
            count -= 1
        self.position = position
        self.skip(8 * count)

    def _strings_from(self, position: int, count: int) -> list[bytes]:
        """The texts of an array that is complete in the head. `position`: that of the first length."""
        head = self._head
        unpack = _U64.unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(head, position)[0]
            texts.append(head[start:position])
        return texts
