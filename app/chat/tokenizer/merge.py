"""Merges the tokenizer files of a model folder, as AutoTokenizer of transformers does:

tokenizer.json             the tokenizer; some classes use only its vocabulary and merges
tokenizer_config.json      class, special tokens, added_tokens_decoder
special_tokens_map.json    special tokens, if there is no added_tokens_decoder
added_tokens.json          added tokens, if there is no added_tokens_decoder
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ....engine.errors import ModelRefused
from . import mistral_regex, pipelines
from .classes import AS_STORED, class_of, names_byte_level
from .files import SideFiles, read_text
from .special_names import Names, read_names, read_token
from .special_tokens import is_ordinary

# A text that tokenizers split in different ways: numbers, apostrophes, spaces, a letter of two characters.
_SAMPLE = "Hello 12345, isn't it?\n\n  caf\u0065\u0301 日本"


class _Stored(msgspec.Struct, frozen=True):
    added_tokens: list[dict[str, Any]] = []


@dataclass(frozen=True, slots=True)
class Merged:
    """The tokenizer of a folder, without truncation or padding, and its special tokens."""

    rust: RustTokenizer
    special: Mapping[str, str]  # name of a template variable (bos_token, eos_token, …) -> text
    # Words and punctuation of the vocabulary that are added tokens only because they are named: pad_token `!`.
    words: frozenset[int]
    warnings: tuple[str, ...]


def merge(folder: Path) -> Merged:
    """The tokenizer of a model folder. Raises ModelRefused naming the file that is missing or broken."""
    files = SideFiles(folder)
    text = read_text(folder / "tokenizer.json")
    name = class_of(files.config, files.model, lambda: '"ByteLevel"' in text)
    try:
        rust = RustTokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelRefused(f"tokenizer.json is not a valid tokenizer: {error}") from None
    stored = {} if files.lists_tokens else _stored_tokens(text)
    names = read_names(files, stored, _padding(rust) | _defaults(name), infills=name == "CodeLlamaTokenizer")
    declared = {entry.content for entry in [*rust.get_added_tokens_decoder().values(), *names.table.values()]}
    rust.no_truncation()
    rust.no_padding()
    pieces = _pieces(rust)
    if name == AS_STORED:
        _add(rust, names)
    else:
        rust = _build(name, rust, files, names)
    warnings = _warnings(name, rust, files, names, splits=_ids(rust, _pieces(rust)) == _ids(rust, pieces))
    mistral_regex.correct(rust, files)
    rust.encode_special_tokens = files.config.get("split_special_tokens") is True
    named = {text for text in names.all_texts if text not in declared and is_ordinary(text)}
    words = (rust.model.token_to_id(text) for text in named)
    return Merged(rust, names.texts, frozenset(token for token in words if token is not None), tuple(warnings))


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the special tokens by name. Raises ModelRefused."""
    files = SideFiles(folder)
    name = class_of(files.config, files.model, lambda: names_byte_level(folder))
    return read_names(files, {}, _defaults(name)).texts


def _stored_tokens(text: str) -> dict[int, AddedToken]:
    try:
        stored = msgspec.json.decode(text, type=_Stored)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"tokenizer.json: added_tokens: {error}") from None
    return {token.get("id", -1): read_token(token, "tokenizer.json: added_tokens") for token in stored.added_tokens}


def _padding(rust: RustTokenizer) -> dict[str, str | None]:
    """The padding token of tokenizer.json, if it has padding."""
    return {"pad_token": rust.padding["pad_token"]} if rust.padding else {}


def _defaults(name: str) -> dict[str, str | None]:
    return {} if name == AS_STORED else dict(pipelines.PIPELINES[name].named)


def _build(name: str, stored: RustTokenizer, files: SideFiles, names: Names) -> RustTokenizer:
    """The tokenizer that the class builds, with its added tokens."""
    pipeline = pipelines.PIPELINES[name]
    processor = stored.post_processor
    rust = pipelines.build(name, stored, files.config, names.texts.get("unk_token"))
    _add(rust, names)
    if pipeline.second_addition == "plain":
        rust.add_tokens([AddedToken(text, special=True) for text in names.all_texts])
    if pipeline.second_addition == "special":
        values = [*names.special.values(), *names.extra]
        rust.add_special_tokens([_as_token(value) for value in values])
    if pipeline.around == "stored" and processor is not None:
        rust.post_processor = processor
    begin = names.texts.get("bos_token")
    if pipeline.around == "bos" and begin is not None:
        tokens = [(begin, rust.token_to_id(begin))]
        rust.post_processor = TemplateProcessing(single=[begin, "$A"], special_tokens=tokens)
    return rust


def _warnings(name: str, rust: RustTokenizer, files: SideFiles, names: Names, *, splits: bool) -> Iterator[str]:
    """`splits`: whether the tokenizer splits a sample as tokenizer.json does."""
    if not splits:
        yield (
            f"tokenizer_class {name} splits words otherwise than tokenizer.json; localllm does as transformers: "
            f"{pipelines.USE_STORED}"
        )
    moved = [index for index, token in names.table.items() if rust.token_to_id(token.content) != index]
    if moved:
        yield f"added tokens have other ids than their files say, as in transformers: {moved[:8]}"
    if files.config.get("clean_up_tokenization_spaces") and not isinstance(rust.model, BPE):
        yield "clean_up_tokenization_spaces is ignored: answers keep the spaces before punctuation"


def _pieces(rust: RustTokenizer) -> list[str]:
    """The parts into which a tokenizer splits a text before its model sees them."""
    text = rust.normalizer.normalize_str(_SAMPLE) if rust.normalizer else _SAMPLE
    return [piece for piece, _ in rust.pre_tokenizer.pre_tokenize_str(text)] if rust.pre_tokenizer else [text]


def _ids(rust: RustTokenizer, pieces: list[str]) -> list[int]:
    return [token.id for piece in pieces for token in rust.model.tokenize(piece)]


def _add(rust: RustTokenizer, names: Names) -> None:
    """Add the tokens that the tokenizer lacks. Those that it has get the flags of the side files."""
    values: list[str | AddedToken] = [token for _, token in sorted(names.table.items())]
    texts = {token.content for token in [*rust.get_added_tokens_decoder().values(), *names.table.values()]}
    for value in [*names.special.values(), *names.extra]:
        if str(value) not in texts and value not in values:
            values.append(value)
    tokens = list(map(_as_token, values))
    named = set(names.texts.values())
    for token in tokens:
        token.special |= token.content in named
    rust.add_tokens(tokens)


def _as_token(value: str | AddedToken) -> AddedToken:
    return value if isinstance(value, AddedToken) else AddedToken(value, special=True)
