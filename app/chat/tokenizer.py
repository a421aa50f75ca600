"""The tokenizer of a model. Reads the files beside the weights and uses the Rust library `tokenizers`; runs no code of
the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...engine.errors import ModelRefused
from ...engine.text import BROKEN
from . import harmony, tokenizer_files
from .byte_tokens import fallback_byte, from_letters, is_misread, mark_broken, to_letters
from .matcher import Vocabulary
from .special_tokens import PROTECT, RELEASE, SpecialTokens, load, unique_name

# A decoder that the grammar compiler supports, in place of Metaspace. It differs only in the first space of a text.
_METASPACE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


class ChatTokenizer:
    """Converts text to ids and back, and has the special tokens and chat templates of the model.

    As in transformers, special tokens in a raw prompt, or in the text of the template, become their ids. Unlike the
    default of transformers, special tokens inside a *message* do not: `protect` marks them before the template runs,
    and `encode` treats marked tokens as plain text. So a document in a message cannot end the message or start one of
    another role. Added tokens that are not special (`<think>`, `<tool_call>`) always become their ids: earlier answers
    contain them.
    """

    def __init__(self, folder: Path, eos_ids: Iterable[int] = ()) -> None:
        """`eos_ids`: end-of-sequence ids of the model's configuration; the eos_token of tokenizer_config.json is added,
        and the end tokens of harmony.py if the vocabulary has them.

        Raises ModelRefused naming the file that is missing or broken.
        """
        config = tokenizer_files.read_json(folder / "tokenizer_config.json")
        text = tokenizer_files.read_text(folder / "tokenizer.json")
        try:
            self._rust = load(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelRefused(f"tokenizer.json is not a valid tokenizer: {error}") from None
        self.vocab_size = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self._added_texts = {token: entry.content for token, entry in added.items()}
        self.special_tokens = tokenizer_files.special_tokens(config)
        self._specials = SpecialTokens(text, self._rust, self.special_tokens.get("unk_token", ""))
        self.special_ids = self._specials.ids
        self.eos_ids = frozenset(eos_ids)
        end = self._rust.token_to_id(self.special_tokens.get("eos_token", ""))
        if end is not None:
            self.eos_ids |= {end}
        self.eos_ids |= harmony.end_ids(self.id_of)
        self.templates = tokenizer_files.chat_templates(folder, config)
        self._decoder = self._rust.decoder
        # Decoders of `tokenizers`, in order: "ByteLevel"; "Replace", "ByteFallback", "Fuse", "Strip"; "WordPiece"; …
        self.decoders = _types(json.loads(self._decoder.__getstate__())) if self._decoder else ()

    def id_of(self, token: str) -> int | None:
        """The id of the token with this exact text; None if the vocabulary has no such token."""
        return self._rust.token_to_id(token)

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens: special tokens, and others such as `<tool_call>`."""
        return frozenset(self._added_texts)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt. Text that `protect` marked becomes no special token.

        `add_special_tokens`: add the tokens around a raw prompt (usually BOS). A chat template writes them itself.
        """
        if PROTECT in text or RELEASE in text:
            return self._specials.encode(text, add_special_tokens=add_special_tokens)
        # As a batch of one text: unlike the library's `encode`, it releases the GIL, and a long text takes seconds.
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data; special tokens in its strings are marked as plain text."""
        return self._specials.protect(value)

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

    def vocabulary(self, size: int) -> Vocabulary:
        """The tokens for the grammar compiler. `size`: vocabulary size of the model."""
        return Vocabulary(size, sorted(self.eos_ids), tokenizer_json=self.to_json())

    def to_json(self) -> str:
        """The text of tokenizer.json, without truncation or padding, changed for the grammar compiler.

        The compiler would read the added tokens in `_respelled` as other bytes and could generate them. Such a token is
        removed if the vocabulary also has its text, and becomes a special token otherwise.
        """
        text = self._rust.to_str()
        if not self._respelled and "Metaspace" not in self.decoders:
            return text
        value = json.loads(text)
        for entry in [entry for entry in value["added_tokens"] if entry["id"] in self._respelled]:
            if self._rust.model.token_to_id(entry["content"]) is None:
                entry |= {"content": unique_name(entry["id"]), "special": True}
            else:
                value["added_tokens"].remove(entry)
        if "Metaspace" in self.decoders:
            value["decoder"] = _METASPACE
        return json.dumps(value, ensure_ascii=False)


def _types(decoder: dict[str, Any]) -> tuple[str, ...]:
    """The type of a decoder, or the types of a sequence of decoders."""
    if decoder["type"] == "Sequence":
        return tuple(name for member in decoder["decoders"] for name in _types(member))
    return (decoder["type"],)
