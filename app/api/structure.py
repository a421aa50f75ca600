"""Limits of the number of values in a JSON text, checked before it is decoded.

The decoder holds the interpreter lock, so a text of very many small values would stop all other requests for seconds.
The check examines the text in short steps.
"""

from __future__ import annotations

from ..errors import InvalidRequest

MAX_CONTAINERS = 2**17  # objects, lists and members of objects
MAX_VALUES = 2**20  # items of lists and members of objects, for example token ids

_CONTAINERS = b"[{:"
_MARKS = b'",' + _CONTAINERS
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEP = 2**16  # bytes


def check_structure(text: bytes) -> None:
    """Raises InvalidRequest if a JSON text has more values than the limits."""
    if _count(text, _CONTAINERS) <= MAX_CONTAINERS and text.count(b",") <= MAX_VALUES:
        return  # these counts include strings, so they are upper bounds
    containers = 0
    values = 0
    is_inside = False  # whether the step begins inside a string
    marks = _marks(text)
    for start in range(0, len(marks), _STEP):
        parts = marks[start : start + _STEP].split(b'"')
        outside = b"".join(parts[is_inside::2])
        containers += _count(outside, _CONTAINERS)
        values += outside.count(b",")
        _check(containers, MAX_CONTAINERS, "objects, lists and fields")
        _check(values, MAX_VALUES, "values")
        is_inside ^= len(parts) % 2 == 0


def _marks(text: bytes) -> bytes:
    """The characters of `text` that begin or end a string, or separate values. Some adjacent pairs of quotation marks
    are missing: they do not change which of the others are inside a string."""
    marks = bytearray()
    start = 0
    while start < len(text):
        end = start + _STEP
        while text[end - 1 : end] == b"\\":  # do not cut an escape sequence
            end += 1
        unescaped = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        marks += unescaped.translate(None, _OTHERS).replace(b'""', b"")
        start = end
    return bytes(marks)


def _count(text: bytes, characters: bytes) -> int:
    return sum(text.count(characters[index : index + 1]) for index in range(len(characters)))


def _check(count: int, limit: int, kind: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has more than {limit} {kind}", hint="send several requests")
