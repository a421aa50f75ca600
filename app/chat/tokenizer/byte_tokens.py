"""The two spellings of bytes in vocabularies: ByteLevel (one letter per byte) and ByteFallback (`<0x41>`)."""

from __future__ import annotations

import codecs
from itertools import groupby
from string import hexdigits

from ....engine.text import BROKEN

# ByteFallback token → its byte.
_FALLBACK = {f"<0x{high}{low}>": bytes.fromhex(high + low) for high in hexdigits for low in hexdigits}
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a UTF-8 character, after its first byte
_MAX_CONTINUATION = 3


def _alphabet() -> dict[str, int]:
    """Letter → byte, as in GPT-2: a printable byte is its own letter, other bytes are the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)).difference(printable))
    letters = map(chr, [*printable, *range(0x100, 0x100 + len(others))])
    return dict(zip(letters, [*printable, *others], strict=True))


_BYTE_OF = _alphabet()
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def to_letters(data: bytes) -> str:
    """The ByteLevel letters of the bytes."""
    return "".join(map(_LETTER_OF.__getitem__, data))


def from_letters(letters: str) -> bytes | None:
    """The bytes of ByteLevel letters; None if a character is not such a letter."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, letters))
    except KeyError:
        return None


def is_misread(text: str) -> bool:
    """True if a ByteLevel decoder would decode the text to bytes that occur in no UTF-8 text."""
    data = from_letters(text)
    return data is not None and not _in_utf8(data)


def _in_utf8(data: bytes) -> bool:
    """True if the bytes occur in the UTF-8 encoding of some text, and one of them starts a character."""
    rest = data.lstrip(_CONTINUATION)
    if not rest or len(data) - len(rest) > _MAX_CONTINUATION:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(rest)
    except UnicodeDecodeError:
        return False
    return True


def fallback_byte(token: str) -> bytes:
    """The byte of a ByteFallback token; empty for any other token."""
    return _FALLBACK.get(token, b"")


def mark_broken(tokens: list[str]) -> list[str]:
    """Replace ByteFallback tokens that belong to no UTF-8 character by U+FFFD; keep all other tokens."""
    if _FALLBACK.keys().isdisjoint(tokens):
        return tokens
    marked: list[str] = []
    for run in _runs(tokens):
        marked += _mark_broken_bytes(run) if run[0] in _FALLBACK else run
    return marked


def _runs(tokens: list[str]) -> list[list[str]]:
    """The tokens, split into runs that have either only ByteFallback tokens or none."""
    return [list(run) for _, run in groupby(tokens, key=_FALLBACK.__contains__)]


def _mark_broken_bytes(tokens: list[str]) -> list[str]:
    text = b"".join(map(fallback_byte, tokens)).decode("utf-8", "surrogateescape")
    index = 0
    for character in text:
        if "\udc80" <= character <= "\udcff":  # surrogateescape writes one such character per invalid byte
            tokens[index] = BROKEN
        index += len(character.encode("utf-8", "surrogateescape"))
    return tokens
