"""The tokenizer of a GGUF file: the vocabulary in the file, and llama.cpp's own code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....backends.llamacpp.library import load_model
from ....backends.llamacpp.vocabulary import MAX_TEXT, Attribute, Vocabulary
from ....engine.errors import ModelRefused
from ....engine.files.model_files import ModelFiles
from ...errors import InvalidRequest, OutOfMemory
from ..calls import harmony
from ..calls.records import MARKERS
from .base import TokenTable
from .gguf_metadata import DEFAULT_TOKENS, chat_templates, token_ids
from .protection import Protection, unmark
from .special_tokens import PROTECT, RELEASE, control_ids, own_markers

_SPACE = "▁"  # a space in the texts of sentencepiece vocabularies
_WHITE = " \t\n\v\f\r"  # the white space of LSTRIP and RSTRIP
_BAD_BYTE = b"[UNK_BYTE_0x"  # llama.cpp writes it for a letter of a byte-level vocabulary that is not a byte
# Bytes that occur in UTF-8. llama.cpp ends the process, or never returns, if these vocabularies have no token for one.
_UTF8 = frozenset(range(0xC0)) | frozenset(range(0xC2, 0xF5))
_WITH_BYTES = ("SPM", "RWKV")
_WITH_UNKNOWN = ("WPM", "UGM")  # these write the unknown token for other characters
# Control tokens of gpt-oss, which llama.cpp changes to user-defined tokens so that its answers show them.
_HARMONY = harmony.MARKERS - {harmony.RETURN, harmony.CALL}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a text. `continues`: it continues the text before it, so that no space is added."""

    start: int
    stop: int
    continues: bool = False


class GgufTokenizer:
    """Implements app.chat.tokenizer.base.Tokenizer with the vocabulary of a GGUF file.

    The text of a message cannot become a control token: `protect` marks each spelling of such a token, and `encode`
    treats marked text as plain text. As in llama.cpp, other user-defined tokens become their ids in any text.
    """

    def __init__(self, files: ModelFiles, vocabulary: Vocabulary, *, parsed: AbstractSet[str] = MARKERS) -> None:
        """`parsed`: the markers that the parser of answers acts on.

        Raises ModelRefused for a vocabulary that llama.cpp cannot use safely.
        """
        self._vocabulary = vocabulary
        self.warnings: tuple[str, ...] = ()
        if vocabulary.kind == "none":
            raise ModelRefused(f"{files.name} has no tokenizer: its file has no vocabulary", "use another file")
        self.vocab_size = vocabulary.size
        attributes = vocabulary.attributes()
        self._check_bytes(files.name, attributes)
        added = int(Attribute.CONTROL | Attribute.UNKNOWN | Attribute.USER_DEFINED)
        self._attributes = {token: value for token, value in enumerate(attributes) if value & added}
        self._texts = {token: vocabulary.text(token) for token in self._attributes}
        self._ids = {text: token for token, text in self._texts.items()}
        unknown = self._added_with(Attribute.UNKNOWN)
        self.special_ids = self._added_with(Attribute.CONTROL) | unknown | self._ids_of(_HARMONY)
        ends = {*self._texts, *files.eos_ids}
        self.eos_ids = frozenset(filter(vocabulary.ends_generation, ends))
        self.templates = chat_templates(files.metadata)
        named = self._default_ids() | token_ids(files.metadata, self.vocab_size)
        self.special_tokens = {name: vocabulary.text(token) for name, token in named.items()}
        special = self.special_ids | self.eos_ids | set(named.values())
        self.control_ids = control_ids(self._texts, special, self.templates.values(), parsed)
        self.control_tokens = {self._texts[token]: token for token in self.control_ids}
        if vocabulary.kind in _WITH_UNKNOWN:
            unknown |= {named.get("unk_token", -1)}
        self._never = self.control_ids - unknown  # never made from plain text
        self._protection = self._protect(self.control_ids)
        own = own_markers(self._texts, self.special_ids, parsed)
        self._protection_of_answers = self._protect(self.control_ids - own)
        self._pieces: dict[int, bytes] = {}
        # Sentencepiece vocabularies begin a text with a space, which is not part of the text.
        self._adds_space = self._join(vocabulary.tokenize("a", special=False)).startswith(b" ")

    @property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self._texts)

    @property
    def kind(self) -> str:
        return f"{self._vocabulary.kind} vocabulary of llama.cpp"

    def id_of(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        ids = self._tokenize(token, special=False) if token else []
        return ids[0] if len(ids) == 1 and self._vocabulary.text(ids[0]) == token else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if PROTECT in text or RELEASE in text:
            ids = self._encode_marked(text)
        else:
            ids = self._tokenize(text, special=True)
        if not add_special_tokens:
            return ids
        before, after = self._around
        return before + ids + after

    def protect(self, value: Any, *, own: bool = False) -> Any:
        protection = self._protection_of_answers if own else self._protection
        return protection.mark(value)

    def decode(self, ids: Sequence[int], *, hidden: frozenset[int] = frozenset()) -> str:
        data = self._join(token for token in ids if token not in hidden)
        if self._adds_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._vocabulary.piece(token)
            if _BAD_BYTE in piece:
                piece = self._vocabulary.text(token).encode()
            self._pieces[token] = piece
        return piece

    def vocabulary(self, size: int) -> TokenTable:
        tokens = list(map(self.token_bytes, range(size)))
        return TokenTable(tokens, self.eos_ids, self.control_ids)

    def _added_with(self, attribute: Attribute) -> frozenset[int]:
        return frozenset(token for token, value in self._attributes.items() if value & attribute)

    def _ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        return frozenset(self._ids[text] for text in texts if text in self._ids)

    def _protect(self, ids: Iterable[int]) -> Protection:
        return Protection(self._texts[token] for token in ids)

    def _check_bytes(self, name: str, attributes: Sequence[int]) -> None:
        """Raises ModelRefused if a text exists that llama.cpp cannot tokenize."""
        if self._vocabulary.kind not in _WITH_BYTES:
            return
        byte = int(Attribute.BYTE)
        likely = [token for token, value in enumerate(attributes) if value & byte]
        missing = _UTF8 - self._single_bytes(likely)
        if missing:
            missing -= self._single_bytes(range(self.vocab_size))
        if missing:
            raise ModelRefused(
                f"{name}: its vocabulary has no token for the byte {min(missing):#04x}", "use another file"
            )

    def _single_bytes(self, tokens: Iterable[int]) -> set[int]:
        """The bytes that are tokens."""
        pieces = map(self._vocabulary.piece, tokens)
        return {piece[0] for piece in pieces if len(piece) == 1}

    def _default_ids(self) -> dict[str, int]:
        """Special tokens without metadata. Byte-level vocabularies have none: their default is any token."""
        if self._vocabulary.kind == "BPE":
            return {}
        ids = ((name, self._vocabulary.special(short)) for name, short in DEFAULT_TOKENS.items())
        return {name: token for name, token in ids if token is not None}

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids before and after a raw prompt."""
        vocabulary = self._vocabulary
        names = {"WPM": ("bos", "sep"), "RWKV": ("", ""), "PLAMO2": ("", "")}
        default = ("bos" if vocabulary.adds_bos else "", "eos" if vocabulary.adds_eos else "")
        before, after = names.get(vocabulary.kind, default)
        return self._special_id(before), self._special_id(after)

    def _special_id(self, name: str) -> list[int]:
        token = self._vocabulary.special(name) if name else None
        return [] if token is None else [token]

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        if len(text) > MAX_TEXT:
            raise InvalidRequest(f"the text has {len(text)} characters; the limit of GGUF models is {MAX_TEXT}")
        try:
            ids = self._vocabulary.tokenize(text, special=special)
        except MemoryError:
            raise OutOfMemory(f"there is no memory to tokenize a text of {len(text)} characters") from None
        if ids and min(ids) < 0:
            raise InvalidRequest("the text has a character that the vocabulary of this model cannot represent")
        return ids

    def _join(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    @cached_property
    def _longest_first(self) -> list[int]:
        """The added tokens, by the length of their texts in bytes."""
        return sorted(self._texts, key=lambda token: len(self._texts[token].encode()), reverse=True)

    def _encode_marked(self, text: str) -> list[int]:
        """The ids of a text in which control tokens are marked as plain text."""
        plain, masked = unmark(text)
        ids: list[int] = []
        for part in self._parts(plain, masked):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(plain[part.start : part.stop], part.continues)
        return ids

    def _parts(self, plain: str, masked: str) -> list[_Part | int]:
        """The added tokens in a text, and the parts of the text between them.

        As in llama.cpp, longer tokens are searched first, each in the complete text.
        """
        parts: list[_Part | int] = [_Part(0, len(plain))]
        for token in self._longest_first:
            text = self._texts[token]
            if not text or text not in plain:
                continue
            divided: list[_Part | int] = []
            for part in parts:
                divided += [part] if isinstance(part, int) else self._divide(token, plain, masked, part)
            parts = divided
        return parts

    def _divide(self, token: int, plain: str, masked: str, part: _Part) -> list[_Part | int]:
        """The part, divided at each occurrence of a token, and inside each protected occurrence.

        llama.cpp replaces a user-defined token in any text. It does not see one that is in two parts.
        """
        text = self._texts[token]
        parts: list[_Part | int] = []
        start, continues = part.start, part.continues
        index = plain.find(text, start, part.stop)
        while index >= 0:
            end = index + len(text)
            if token not in self.control_ids or masked[index:end] == text:
                stop = self._stripped_stop(token, plain, start, index)
                parts += [_Part(start, stop, continues), token]
                start, continues = self._stripped_start(token, plain, end, part.stop), False
            elif self._attributes[token] & Attribute.USER_DEFINED:
                cut = index + _cut(text)
                parts.append(_Part(start, cut, continues))
                start, continues = cut, True
            index = plain.find(text, max(start, index + 1), part.stop)
        parts.append(_Part(start, part.stop, continues))
        return [part for part in parts if isinstance(part, int) or part.stop > part.start]

    def _stripped_stop(self, token: int, plain: str, start: int, stop: int) -> int:
        """The end of the text before a token, without white space that belongs to the token."""
        return start + len(plain[start:stop].rstrip(_WHITE)) if self._attributes[token] & Attribute.LSTRIP else stop

    def _stripped_start(self, token: int, plain: str, start: int, stop: int) -> int:
        """The start of the text after a token, without white space that belongs to the token."""
        return stop - len(plain[start:stop].lstrip(_WHITE)) if self._attributes[token] & Attribute.RSTRIP else start

    def _encode_plain(self, text: str, continues: bool) -> list[int]:
        """The ids of a text without control tokens. Merges may produce one, which is replaced by its letters.

        `continues`: the text has no space before it.
        """
        ids: list[int] = []
        for token in self._continuation(text) if continues else self._tokenize(text, special=False):
            ids += self._letters(token) if token in self._never else [token]
        return ids

    def _continuation(self, text: str) -> list[int]:
        """The ids of a text after other text."""
        if not self._adds_space:
            return self._tokenize(text, special=False)
        before = self._tokenize(PROTECT, special=False)  # no token has this character
        ids = self._tokenize(PROTECT + text, special=False)
        return ids[len(before) :] if ids[: len(before)] == before else self._tokenize(text, special=False)

    def _letters(self, token: int) -> list[int]:
        """The ids of the text of a token, letter by letter or byte by byte."""
        ids: list[int] = []
        for letter in self._texts[token].replace(_SPACE, " "):
            data = letter.encode()
            units = [data] if data in self._units else [bytes([byte]) for byte in data]
            ids += [self._units[unit] for unit in units if unit in self._units]
        return ids

    @cached_property
    def _units(self) -> dict[bytes, int]:
        """The tokens of single characters and single bytes."""
        pieces = {self.token_bytes(token): token for token in range(self.vocab_size) if token not in self._texts}
        return {piece: token for piece, token in pieces.items() if len(piece) == 1 or _is_character(piece)}


def open_tokenizer(files: ModelFiles) -> GgufTokenizer:
    """The tokenizer of a GGUF file, which read_model has accepted. Its vocabulary stays in memory until this process
    ends. Raises ModelRefused."""
    return GgufTokenizer(files, Vocabulary(load_model(files.name, files.gguf, vocab_only=True)))


def _cut(text: str) -> int:
    """The place inside a token where the splitting of words divides it, too: before the punctuation at its end."""
    words = len(re.sub(r"\W+$", "", text))
    return words if 0 < words < len(text) else len(text) - 1


def _is_character(piece: bytes) -> bool:
    return len(piece.decode("utf-8", "replace")) == 1
