"""The tokenizer of a model, from the files beside its weights, on top of the Rust library `tokenizers`. Runs no code
of the model."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from ...engine.errors import ModelRefused
from ...engine.text import BROKEN

# Put around a special token in the text of a message, so that `encode` treats it as plain text.
# Private-use characters of plane 15: no message needs them, so `protect` removes them from messages.
PROTECT, RELEASE = "\U000fff00", "\U000fff01"
_PROTECTED = re.compile(f"{PROTECT}([^{PROTECT}{RELEASE}]*){RELEASE}")

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # how a ByteFallback vocabulary spells a byte

MAX_JSON = 128 * 2**20  # bytes; the largest tokenizer.json in use is about 35 MB


class ChatTokenizer:
    """Converts text to ids and back, and has the special tokens and chat templates of the model.

    As in transformers, special tokens in a raw prompt, or in the text of the template, become their ids. Unlike the
    default of transformers, special tokens inside a *message* do not: `protect` marks them before the template runs,
    and `encode` treats marked tokens as plain text. So a document in a message cannot end the message or start one of
    another role. Added tokens that are not special (`<think>`, `<tool_call>`) always become their ids: earlier answers
    contain them.
    """

    def __init__(self, folder: Path, eos_ids: Iterable[int] = ()) -> None:
        """`eos_ids`: end-of-sequence ids of the model's configuration; the eos_token of tokenizer_config.json is added.

        Raises ModelRefused naming the file that is missing or broken.
        """
        config = _read_json(folder / "tokenizer_config.json", required=False)
        self._text = _read_text(folder / "tokenizer.json")
        try:
            self._rust = RustTokenizer.from_str(self._text)
        except Exception as error:  # the library raises bare Exception
            raise ModelRefused(f"tokenizer.json is not a valid tokenizer: {error}") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self._decoder = self._rust.decoder
        # Decoders of `tokenizers`, in order: "ByteLevel"; "Replace", "ByteFallback", "Fuse", "Strip"; "WordPiece"; …
        self.decoders = _kinds(json.loads(self._decoder.__getstate__())) if self._decoder else ()
        self.vocab_size = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.special_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(config.get(name))) is not None
        }
        end = self._rust.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset(eos_ids) | ({end} if end is not None else set())
        self.templates = _find_templates(folder, config)
        self._specials = {added[token].content: token for token in self.special_ids}
        self._special = re.compile("|".join(map(re.escape, sorted(self._specials, key=len, reverse=True))) or "(?!)")

    def id_of(self, token: str) -> int | None:
        """The id of the token with this exact text; None if the vocabulary has no such token."""
        return self._rust.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt. Text that `protect` marked becomes no special token.

        `add_special_tokens`: add the tokens around a raw prompt (usually BOS). A chat template writes them itself.
        """
        if PROTECT not in text and RELEASE not in text:
            return _encode(self._rust, text, add_special_tokens)
        guarded, originals = self._guarded
        parts = [part.replace(PROTECT, "").replace(RELEASE, "") for part in _PROTECTED.split(text)]
        parts[::2] = [self._named(part) for part in parts[::2]]
        encoding = guarded.encode_batch_fast(["".join(parts)], add_special_tokens=add_special_tokens)[0]
        unknown = self._rust.token_to_id(self.special_tokens.get("unk_token", ""))
        ids: list[int] = []
        for token, added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            # A Unigram vocabulary contains the texts of its special tokens.
            if token in self.special_ids and token != unknown and not added:
                letters = self._rust.id_to_token(token) or ""
                ids += [piece.id for letter in letters for piece in guarded.model.tokenize(letter)]
            else:
                ids.append(originals.get(token, token))
        return ids

    @cached_property
    def _guarded(self) -> tuple[RustTokenizer, dict[int, int]]:
        """A second tokenizer that encodes special tokens as text, and a map of ids.

        It has one more token per special token, named with characters that `protect` removes from messages. The map
        leads from the id of such a name to the id of the special token.
        """
        rust = RustTokenizer.from_str(self._text)
        rust.no_truncation()
        rust.no_padding()
        rust.encode_special_tokens = True
        added = self._rust.get_added_tokens_decoder()
        names = [
            AddedToken(_name(token), lstrip=added[token].lstrip, rstrip=added[token].rstrip, normalized=False)
            for token in self.special_ids
        ]
        rust.add_tokens(names)
        named = {rust.token_to_id(_name(token)): token for token in self.special_ids}
        return rust, {name: token for name, token in named.items() if name is not None}

    def _named(self, text: str) -> str:
        """Replace special tokens by their names. A single-word token inside a longer word stays text."""

        def name(match: re.Match[str]) -> str:
            token = self._specials[match[0]]
            start, end = match.span()
            inside = re.search(r"\w", text[max(start - 1, 0) : start] + text[end : end + 1])
            return match[0] if inside and token in self._single_words else _name(token)

        return self._special.sub(name, text)

    @cached_property
    def _single_words(self) -> frozenset[int]:
        added = self._rust.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.single_word)

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data; special tokens in its strings are marked as plain text."""
        if isinstance(value, str):
            value = value.replace(PROTECT, "").replace(RELEASE, "")
            return self._special.sub(lambda match: f"{PROTECT}{match[0]}{RELEASE}", value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list) else value

    def decode(self, ids: Sequence[int], *, hidden: frozenset[int] = frozenset()) -> str:
        """The text of the ids, without `hidden` ids. Spaces are not cleaned up.

        Differs from `tokenizers` where that library loses text. If one byte of a run of byte tokens is invalid, its
        ByteFallback writes U+FFFD for each byte of the run; here the valid characters stay, as in sentencepiece. Its
        ByteLevel decodes an added token such as `é` as a byte; here it is text.
        """
        ids = [token for token in ids if token not in hidden]
        if "ByteFallback" in self.decoders:
            tokens = (self._rust.id_to_token(token) for token in ids)
            return self._decode_tokens(_mark_broken([token for token in tokens if token is not None]))
        if self._respelled.keys().isdisjoint(ids):
            return self._rust.decode(ids, skip_special_tokens=False)
        spelled = (self._respelled.get(token) or self._rust.id_to_token(token) for token in ids)
        return self._decode_tokens([token for token in spelled if token is not None])

    def _decode_tokens(self, tokens: list[str]) -> str:
        return self._decoder.decode(tokens) if self._decoder else " ".join(tokens)

    @cached_property
    def _respelled(self) -> dict[int, str]:
        """Added tokens that the ByteLevel decoder would decode as invalid bytes: id → text in ByteLevel spelling."""
        if "ByteLevel" not in self.decoders:
            return {}
        added = {token: entry.content for token, entry in self._rust.get_added_tokens_decoder().items()}
        return {
            token: "".join(_LETTER_OF[byte] for byte in text.encode())
            for token, text in added.items()
            if not text.isascii() and all(letter in _BYTE_OF for letter in text)
            if not _in_utf8(bytes(_BYTE_OF[letter] for letter in text))
        }

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text, possibly a part of a character; empty for an unknown id."""
        text = self._respelled.get(token) or self._rust.id_to_token(token)
        if text is None:
            return b""
        if "ByteFallback" in self.decoders and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        before = "a"  # any text: the decoder may drop the space of a first token
        more = self._decode_tokens([before, text])[len(before) :]
        if BROKEN in more and "ByteLevel" in self.decoders and all(letter in _BYTE_OF for letter in text):
            return bytes(_BYTE_OF[letter] for letter in text)
        return more.encode()

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of the added tokens: special tokens, and others such as `<tool_call>`."""
        return frozenset(self._rust.get_added_tokens_decoder())

    def to_json(self) -> str:
        """The text of tokenizer.json, without truncation or padding, changed for the grammar compiler.

        The compiler reads an added token as ByteLevel bytes and could generate it. Such a token is removed if the
        vocabulary also has it, and becomes a special token otherwise. The compiler does not support the Metaspace
        decoder, so an equal sequence of decoders replaces it (equal except for the first space of a text).
        """
        text = self._rust.to_str()
        if not self._respelled and "Metaspace" not in self.decoders:
            return text
        value = json.loads(text)
        for entry in list(value["added_tokens"]):
            if entry["id"] not in self._respelled:
                continue
            if self._rust.model.token_to_id(entry["content"]) is not None:
                value["added_tokens"].remove(entry)
            else:
                entry |= {"content": _name(entry["id"]), "special": True}
        if "Metaspace" in self.decoders:
            spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
            value["decoder"] = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
        return json.dumps(value, ensure_ascii=False)


def _name(token: int) -> str:
    return f"{PROTECT}{token}{RELEASE}"


def _encode(rust: RustTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Encode as a batch of one text: unlike `encode`, that releases the GIL; a long text takes seconds."""
    return rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as in GPT-2: a printable byte is itself, the others are the characters after code point 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_alphabet()
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def _in_utf8(part: bytes) -> bool:
    """True if the bytes occur in the UTF-8 encoding of some text."""
    start = next((at for at, byte in enumerate(part[:4]) if byte & 0xC0 != 0x80), 4)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(part[start:])
    except UnicodeDecodeError:
        return False
    return start < 4


def _kinds(decoder: dict[str, Any]) -> tuple[str, ...]:
    """The type of a decoder, or the types of a sequence of decoders."""
    if decoder["type"] == "Sequence":
        return tuple(kind for part in decoder["decoders"] for kind in _kinds(part))
    return (decoder["type"],)


def _mark_broken(tokens: list[str]) -> list[str]:
    """Replace byte tokens that belong to no UTF-8 character by U+FFFD; keep all others."""
    marked: list[str] = []
    for is_byte, group in groupby(tokens, key=lambda token: _BYTE_TOKEN.fullmatch(token) is not None):
        run = list(group)
        if is_byte:
            at = 0
            for character in bytes(int(token[3:5], 16) for token in run).decode("utf-8", "surrogateescape"):
                if "\udc80" <= character <= "\udcff":  # surrogateescape writes one such character per invalid byte
                    run[at] = BROKEN
                    at += 1
                else:
                    at += len(character.encode())
        marked += run
    return marked


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelRefused(f"{path.name} has {path.stat().st_size} bytes; the limit is {MAX_JSON}")
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelRefused(
            f"{path.name} is missing",
            hint="this version supports only tokenizers in the Hugging Face format (tokenizer.json)",
        ) from None
    except UnicodeDecodeError:
        raise ModelRefused(f"{path.name} is not UTF-8 text") from None
    except OSError as error:
        raise ModelRefused(f"{path.name} cannot be read: {error.strerror}") from None


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{path.name}: must contain a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """Special tokens are written as text or as {"content": text, …}."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _find_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: "default", and "tool_use" for some models. A template file precedes
    tokenizer_config.json."""
    jinja, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    value: object = config.get("chat_template")
    source = folder / "tokenizer_config.json"
    if wrapped.exists():
        value, source = _read_json(wrapped, required=True).get("chat_template"), wrapped
    if jinja.exists():
        value, source = _read_text(jinja), jinja
    more = folder / "additional_chat_templates"
    named: Iterable[tuple[object, object]]
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = [(entry.get("name"), entry.get("template")) for entry in value]
    else:
        named = [] if value is None else [("default", value)]
    named = [*named, *((path.stem, _read_text(path)) for path in sorted(more.glob("*.jinja")))]
    templates: dict[str, str] = {}
    for name, text in named:
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelRefused(f"{source.name}: chat_template must be a string or a list of named strings")
        templates[name] = text
    return templates
