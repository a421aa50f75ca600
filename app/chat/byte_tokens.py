"""The two spellings of bytes in vocabularies: ByteLevel (one letter per byte) and ByteFallback (`<0x41>`)."""

from __future__ import annotations

import codecs
import re
from itertools import groupby

from ...engine.text import BROKEN

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a UTF-8 character, after its first byte
_MAX_CONTINUATION = 3


def _alphabet() -> dict[str, int]:
    """Letter → byte, as in GPT-2: a printable byte has its own letter, the others have the letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)).difference(printable))
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _alphabet()
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def to_letters(data: bytes) -> str:
    """The ByteLevel letters of the bytes."""
    return "".join(_LETTER_OF[byte] for byte in data)


def from_letters(letters: str) -> bytes | None:
    """The bytes of ByteLevel letters; None if a character is not such a letter."""
    if not _BYTE_OF.keys() >= set(letters):
        return None
    return bytes(_BYTE_OF[letter] for letter in letters)


def is_misread(text: str) -> bool:
    """True if a ByteLevel decoder would decode the text as bytes that no UTF-8 text has."""
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
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else b""


def mark_broken(tokens: list[str]) -> list[str]:
    """Replace ByteFallback tokens that belong to no UTF-8 character by U+FFFD; keep all others."""
    marked: list[str] = []
    for run in _runs(tokens):
        marked += _mark_broken_bytes(run) if fallback_byte(run[0]) else run
    return marked


def _runs(tokens: list[str]) -> list[list[str]]:
    """The runs of byte tokens and the runs of other tokens, in order."""
    return [list(run) for _, run in groupby(tokens, key=lambda token: bool(fallback_byte(token)))]


def _mark_broken_bytes(tokens: list[str]) -> list[str]:
    text = b"".join(map(fallback_byte, tokens)).decode("utf-8", "surrogateescape")
    index = 0
    for character in text:
        if "\udc80" <= character <= "\udcff":  # surrogateescape writes one such character per invalid byte
            tokens[index] = BROKEN
        index += len(character.encode("utf-8", "surrogateescape"))
    return tokens
