"""The text of single tokens in log-probabilities: its spelling, and its place in the text of the answer."""

from __future__ import annotations

import codecs

BROKEN = "\ufffd"  # decoders write it for bytes that are no character
_BACKSLASH = 0x5C

_new_decoder = codecs.getincrementaldecoder("utf-8")


def spelling(raw: bytes) -> str:
    """The bytes of a token as text. As in OpenAI's API, bytes that are no complete text are spelled `bytes:\\xe2\\x80`,
    so that different tokens have different spellings."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(map(_spelled_byte, raw))


def _spelled_byte(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != _BACKSLASH else f"\\x{byte:02x}"


class TextOffsets:
    """Finds the characters of an answer at which its tokens begin.

    The text is the reference, because not every byte of a token is in it: special tokens are hidden, a stop string cuts
    the last token, and a decoder may drop the first space. Call `add` with new text, then `of` for each of the tokens
    that it completes.
    """

    def __init__(self) -> None:
        self._offset = 0  # characters before the next token
        self._rest = ""  # the text after these characters
        self._decoder = _new_decoder("replace")

    def add(self, text: str) -> None:
        self._rest += text

    def of(self, raw: bytes) -> int:
        """The offset of a token with these bytes. A token that continues a character has the offset of this character;
        a token without text has the offset of the text after it."""
        pending = self._decoder.getstate()[0]
        if pending and not _continues(pending, raw[:1]):
            self._consume(self._decoder.decode(b"", final=True))
        offset = self._offset
        text = self._decoder.decode(raw)
        if not self._rest.startswith(text) and self._rest.startswith(BROKEN):
            # Some decoders write one U+FFFD for each byte of a broken character.
            surplus = _leading(self._rest) - _leading(text)
            if surplus > 0 and self._rest.startswith(text, surplus):
                self._skip(surplus)
                offset = self._offset
        self._consume(text)
        return offset

    def _consume(self, text: str) -> None:
        """Advance over the text of a token, as far as the answer has it."""
        for visible in (text, text.removeprefix(" ")):
            if self._rest.startswith(visible):
                self._skip(len(visible))
                return
        if text.startswith(self._rest):  # cut by a stop string
            self._skip(len(self._rest))

    def _skip(self, count: int) -> None:
        self._offset += count
        self._rest = self._rest[count:]


def _continues(pending: bytes, more: bytes) -> bool:
    """Whether `more` can follow the bytes of an incomplete character."""
    try:
        _new_decoder().decode(pending + more)
    except UnicodeDecodeError:
        return False
    return True


def _leading(text: str) -> int:
    """The number of U+FFFD at the start of a text."""
    return len(text) - len(text.lstrip(BROKEN))
