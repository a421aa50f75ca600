"""The tokenizer of a model. Reads the files beside the weights and uses the Rust library `tokenizers`; runs no code of
the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from pathlib import Path
from typing import Any

from ....engine.text import BROKEN
from ..calls import harmony
from ..calls.records import MARKERS
from . import files, merge
from .base import TokenTable
from .byte_tokens import fallback_byte, from_letters, is_misread, mark_broken, to_letters
from .protection import GuardedTokenizer
from .special_tokens import PROTECT, RELEASE, control_ids, own_markers

# Decoders that add the same bytes for a token in any text, except for a space at the start of the text.
_FIXED = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"})
_BYTES = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})  # a grammar needs one of these decoders


class ChatTokenizer:
    """Converts text to ids and back, and has the control tokens and chat templates of the model.

    As in transformers, control tokens in a raw prompt, or in the text of the template, become their ids. Unlike in
    transformers, control tokens inside a *message* do not: `protect` marks them before the template runs, and `encode`
    treats marked tokens as plain text. So a document in a message cannot end the message, start one of another role, or
    open a tool call. Other added tokens (words, spaces) become their ids in any text.
    """

    def __init__(self, folder: Path, eos_ids: Iterable[int] = (), *, parsed: AbstractSet[str] = MARKERS) -> None:
        """`eos_ids`: end-of-sequence ids of the model's configuration; the eos_token of the tokenizer is added, and
        the end tokens of calls/harmony.py if the vocabulary has them. `parsed`: the markers that the parser of answers
        acts on.

        Raises ModelRefused naming the file that is missing or broken.
        """
        merged = merge.merge(folder)
        self._rust = merged.rust
        self.warnings = merged.warnings
        self.vocab_size = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self._added_texts = {token: entry.content for token, entry in added.items()}
        self.special_tokens = dict(merged.special)
        self.eos_ids = frozenset(eos_ids)
        end = self._rust.token_to_id(self.special_tokens.get("eos_token", ""))
        if end is not None:
            self.eos_ids |= {end}
        self.eos_ids |= harmony.end_ids(self.id_of)
        self.templates = files.chat_templates(folder, files.read_json(folder / "tokenizer_config.json"))
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special) - merged.words
        named = {token for token, name in self._added_texts.items() if name in self.special_tokens.values()}
        special = (self.special_ids | self.eos_ids | named) - merged.words
        self.control_ids = control_ids(self._added_texts, special, self.templates.values(), parsed)
        self.control_tokens = {self._added_texts[token]: token for token in self.control_ids}
        unknown = self.special_tokens.get("unk_token", "")
        self._guarded = GuardedTokenizer(self._rust, self.control_ids, unknown=unknown)
        own = own_markers(self._added_texts, self.special_ids, parsed)
        self._protection = self._guarded.protection(self.control_ids)
        self._protection_of_answers = self._guarded.protection(self.control_ids - own)
        self._decoder = self._rust.decoder
        # Decoders of `tokenizers`, in order: "ByteLevel"; "Replace", "ByteFallback", "Fuse", "Strip"; "WordPiece"; …
        state = json.loads(self._decoder.__getstate__()) if self._decoder else None
        self.decoders = tuple(member["type"] for member in _members(state)) if state else ()

    def id_of(self, token: str) -> int | None:
        """The id of the token with this exact text; None if the vocabulary has no such token."""
        return self._rust.token_to_id(token)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens: special tokens, and others such as `<tool_call>`."""
        return frozenset(self._added_texts)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt. Text that `protect` marked becomes no control token.

        `add_special_tokens`: add the tokens around a raw prompt (usually BOS). A chat template writes them itself.
        """
        if PROTECT in text or RELEASE in text:
            return self._guarded.encode(text, add_special_tokens=add_special_tokens)
        # As a batch of one text: unlike the library's `encode`, it releases the GIL, and a long text takes seconds.
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def protect(self, value: Any, *, own: bool = False) -> Any:
        protection = self._protection_of_answers if own else self._protection
        return protection.mark(value)

    def decode(self, ids: Sequence[int], *, hidden: frozenset[int] = frozenset()) -> str:
        """The text of the ids, without `hidden` ids. Spaces are not cleaned up.

        Differs from `tokenizers` where that library loses text. If one byte of a run of byte tokens is invalid, the
        library writes U+FFFD for each byte of the run (ByteFallback); here the valid characters stay, as in
        sentencepiece. The library decodes an added token such as `ü` as a byte (ByteLevel); here the token is text.
        """
        ids = [token for token in ids if token not in hidden]
        if "ByteFallback" in self.decoders:
            return self._decode_texts(mark_broken(self._texts(ids)))
        if self._respelled.keys().isdisjoint(ids):
            return self._rust.decode(ids, skip_special_tokens=False)
        return self._decode_texts(self._texts(ids))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text, possibly a part of a character; empty for an unknown id."""
        text = "".join(self._texts([token]))
        byte = fallback_byte(text)
        if byte and "ByteFallback" in self.decoders:
            return byte
        before = "a"  # any text: the decoder may drop the space of a first token
        added = self._decode_texts([before, text])[len(before) :] if text else ""
        if BROKEN in added and "ByteLevel" in self.decoders:
            return from_letters(text) or added.encode()
        return added.encode()

    def _texts(self, ids: Iterable[int]) -> list[str]:
        """The texts of the tokens as the decoder expects them; unknown ids are left out."""
        texts = (self._respelled.get(token) or self._rust.id_to_token(token) for token in ids)
        return [text for text in texts if text is not None]

    def _decode_texts(self, texts: list[str]) -> str:
        return self._decoder.decode(texts) if self._decoder else " ".join(texts)

    @cached_property
    def _respelled(self) -> dict[int, str]:
        """Added tokens that the ByteLevel decoder would decode as invalid bytes: id → text in ByteLevel letters."""
        if "ByteLevel" not in self.decoders:
            return {}
        return {token: to_letters(text.encode()) for token, text in self._added_texts.items() if is_misread(text)}

    @property
    def kind(self) -> str:
        """The decoders, for error messages."""
        return f"decoder {'+'.join(self.decoders) or 'none'}"

    def vocabulary(self, size: int) -> TokenTable:
        if not _FIXED.issuperset(self.decoders) or _BYTES.isdisjoint(self.decoders) or not self._replaces_spaces():
            raise ValueError("the bytes of a token depend on the tokens beside it")
        tokens = list(map(self.token_bytes, range(size)))
        return TokenTable(tokens, self.eos_ids, self.control_ids)

    def _replaces_spaces(self) -> bool:
        """Whether the decoder replaces nothing but single characters that stand for spaces."""
        state = json.loads(self._decoder.__getstate__())
        replacements = [member for member in _members(state) if member["type"] == "Replace"]
        return all(len(member["pattern"].get("String", "")) == 1 for member in replacements)


def _members(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder, or the decoders of a sequence."""
    if decoder["type"] == "Sequence":
        return [member for part in decoder["decoders"] for member in _members(part)]
    return [decoder]
