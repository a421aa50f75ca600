"""A model's tokenizer, read from the files beside its weights. Rust `tokenizers` does the work; no code is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from ...engine.errors import ModelRefused

# Wrapped around a special token that stands in somebody's message, so that it is encoded as the text it is.
# Private-use characters of plane 15: no message needs them, so `protect` may drop those that come in.
PROTECT, RELEASE = "\U000fff00", "\U000fff01"
_PROTECTED = re.compile(f"{PROTECT}([^{PROTECT}{RELEASE}]*){RELEASE}")

MAX_JSON = 128 * 2**20  # bytes; the largest tokenizer.json in use is about 35 MB


class ChatTokenizer:
    """Text to ids and back, and what the files say about chatting.

    As in transformers, special tokens written in a *rendered prompt* (a raw prompt, or what the template wrote) become
    their ids. Unlike its default, those inside a *message* do not: `protect` marks them before the template runs and
    `encode` takes marked ones as plain text, so a document in a message cannot end its turn or open another role's.
    Added tokens that are not special (`<think>`, `<tool_call>`) keep their ids everywhere: histories hold them.
    """

    def __init__(self, folder: Path, eos_ids: Iterable[int] = ()) -> None:
        """`eos_ids` are those of the model's configuration; tokenizer_config.json's eos_token joins them.

        Raises ModelRefused naming the file that is missing or broken.
        """
        config = _read_json(folder / "tokenizer_config.json", required=False)
        self._text = _read_text(folder / "tokenizer.json")
        try:
            self._rust = RustTokenizer.from_str(self._text)
        except Exception as error:  # the library raises bare Exception
            raise ModelRefused(f"tokenizer.json: not a usable tokenizer: {error}") from None
        self._rust.no_truncation()
        self._rust.no_padding()
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
        contents = sorted((added[token].content for token in self.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, contents)) or "(?!)")

    def id_of(self, token: str) -> int | None:
        """The id of one token's exact text, None when the vocabulary has no such token."""
        return self._rust.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt; text marked by `protect` becomes no special token.

        `add_special_tokens` lets the tokenizer add what it puts around a raw prompt (as a rule its BOS). Chat templates
        write those themselves.
        """
        if PROTECT not in text and RELEASE not in text:
            return _encode(self._rust, text, add_special_tokens)
        ids: list[int] = []
        for index, part in enumerate(_PROTECTED.split(text)):
            rust = self._plain if index % 2 else self._rust
            part = part.replace(PROTECT, "").replace(RELEASE, "")
            ids += _encode(rust, part, add_special_tokens and index == 0)
        return ids

    @cached_property
    def _plain(self) -> RustTokenizer:
        """A second tokenizer that sees special tokens as text; the switch on a shared one would race."""
        rust = RustTokenizer.from_str(self._text)
        rust.encode_special_tokens = True
        return rust

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data with special tokens in its strings marked as plain text."""
        if isinstance(value, str):
            value = value.replace(PROTECT, "").replace(RELEASE, "")
            return self._special.sub(lambda match: f"{PROTECT}{match[0]}{RELEASE}", value)
        if isinstance(value, dict):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        return [self.protect(item) for item in value] if isinstance(value, list) else value

    def decode(self, ids: Sequence[int], *, hidden: frozenset[int] = frozenset()) -> str:
        """Text of ids, `hidden` ones left out."""
        return self._rust.decode([token for token in ids if token not in hidden], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for: a part of a character for some. Unknown ids give nothing."""
        text = self._rust.id_to_token(token)
        if text is None:
            return b""
        if token in self.added_ids:
            return text.encode()
        if self._byte_level:
            return bytes(_BYTE_OF[char] for char in text) if all(char in _BYTE_OF for char in text) else text.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Tokens that the files add to the vocabulary's own: the special ones, and marks such as `<tool_call>`."""
        return frozenset(self._rust.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._text).get("decoder"))

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json text, without truncation or padding (for the grammar compiler)."""
        return self._rust.to_str()


def _encode(rust: RustTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A batch of one: unlike `encode`, it lets other threads run, and long texts take seconds."""
    return rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, reversed: the unprintable ones follow code point 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_JSON:
            raise ModelRefused(f"{path.name}: {path.stat().st_size} bytes are over the limit of {MAX_JSON}")
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelRefused(
            f"{path.name} is missing",
            hint="this version reads tokenizers in the Hugging Face format (tokenizer.json) only",
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
        raise ModelRefused(f"{path.name}: malformed JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{path.name}: expected a JSON object, found {type(value).__name__}")
    return value


def _token_text(value: object) -> str | None:
    """Special tokens are written as text or as {"content": text, …}."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _find_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name ("default", and for some models "tool_use"). A file beats tokenizer_config.json."""
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
            raise ModelRefused(f"{source.name}: chat_template must be text, or a list of named texts")
        templates[name] = text
    return templates
