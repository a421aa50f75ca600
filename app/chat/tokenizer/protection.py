"""Keeps the text of messages plain text: text that looks like a control token does not become that token."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from .special_tokens import PROTECT, RELEASE

_PROTECTED = re.compile(f"{PROTECT}([^{PROTECT}{RELEASE}]){RELEASE}")
_REMOVE_MARKS = str.maketrans("", "", PROTECT + RELEASE)
# Stands for a protected character in the search of control tokens. No normaliser removes or changes it, no token has
# it, and it is no letter.
_FILL = "\u2bd1"
_SPACE = "▁"  # a space in the texts of sentencepiece vocabularies

Span = tuple[int, int]


def load(tokenizer_json: str) -> RustTokenizer:
    """The tokenizer without truncation or padding. Raises Exception, as the library does."""
    rust = RustTokenizer.from_str(tokenizer_json)
    rust.no_truncation()
    rust.no_padding()
    return rust


def unique_name(token: int) -> str:
    """A unique text for a token. No message contains it, because marks are removed from messages."""
    return f"{PROTECT}{token}{RELEASE}"


class Finder:
    """Finds tokens in a text, as `tokenizers` finds added tokens: the longest of those that start first.

    The time is linear in the length of the text, and hardly depends on the number of tokens.
    """

    def __init__(self, tokens: Sequence[AddedToken], normalizer: object = None) -> None:
        """`normalizer`: the JSON of the normalizer for tokens with the flag `normalized`."""
        model = {"type": "WordLevel", "vocab": {_FILL: 0}, "unk_token": _FILL}
        self._rust = load(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}))
        self._rust.add_tokens(list(tokens))
        self._texts = {token: entry.content for token, entry in self._rust.get_added_tokens_decoder().items()}

    def find(self, text: str) -> list[tuple[str, int, int]]:
        """The content, the start and the end of each token, with white space that belongs to it."""
        # The fast variant, which counts no characters, excludes most texts.
        if self._texts.keys().isdisjoint(self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids):
            return []
        encoding = self._rust.encode_batch([text], add_special_tokens=False)[0]
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(self._texts[token], start, end) for token, (start, end) in pairs if token in self._texts]


class Protection:
    """Marks control tokens in the text of messages."""

    def __init__(self, texts: Iterable[str], normalizer: object = None) -> None:
        """`texts`: the texts of the tokens. `normalizer`: the JSON of the normalizer that the tokenizer has."""
        spellings = sorted({spelling for text in texts for spelling in _spellings(text)})
        self._finders = [Finder([AddedToken(text, normalized=False) for text in spellings])]
        if normalizer:
            tokens = [AddedToken(text, normalized=True) for text in spellings]
            self._finders.append(Finder(tokens, normalizer))

    def mark(self, value: Any) -> Any:
        """A copy of JSON-like data, in whose strings every text that can become a token is marked as plain text.

        Each character has its marks: a template may cut a text, and then writes markers of its own.
        """
        if isinstance(value, str):
            return self._mark_text(value.translate(_REMOVE_MARKS))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        spans = sorted((start, end) for finder in self._finders for _, start, end in finder.find(text))
        segments = []
        position = 0
        for start, end in _union(spans):
            segments += [text[position:start], PROTECT, f"{RELEASE}{PROTECT}".join(text[start:end]), RELEASE]
            position = end
        return "".join([*segments, text[position:]])


def _spellings(text: str) -> set[str]:
    """The texts that can become a token. Sentencepiece writes spaces as ▁, and begins a text with one."""
    spaced = text.replace(_SPACE, " ")
    return {text, spaced, spaced.removeprefix(" ")} - {""}


def _union(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans; those that overlap become one."""
    union: list[Span] = []
    for start, end in spans:
        if union and start < union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def unmark(text: str) -> tuple[str, str]:
    """The text without marks, and a text of the same length that has other characters in place of marked text."""
    segments = [segment.translate(_REMOVE_MARKS) for segment in _PROTECTED.split(text)]
    plain = "".join(segments)
    segments[1::2] = [_FILL * len(segment) for segment in segments[1::2]]  # segments at odd indices are protected
    return plain, "".join(segments)


class GuardedTokenizer:
    """Encodes text in which control tokens are marked as plain text, with a tokenizer of the library `tokenizers`."""

    def __init__(self, rust: RustTokenizer, ids: frozenset[int], *, unknown: str) -> None:
        """`unknown`: the unknown token (usually <unk>); empty if there is none."""
        self._rust = rust
        self._ids = ids
        self._added = rust.get_added_tokens_decoder()
        self._normalizer = json.loads(rust.normalizer.__getstate__()) if rust.normalizer else None
        self._never = ids - {rust.token_to_id(unknown)}  # never made from plain text

    def protection(self, ids: Collection[int]) -> Protection:
        """Marks the texts of some control tokens."""
        return Protection((self._added[token].content for token in ids), _without_prefix(self._normalizer))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text in which some text is marked as plain text."""
        guarded, originals = self._guarded
        encoding = guarded.encode_batch_fast([self._with_names(text)], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if is_added or token not in self._never:
                ids.append(originals.get(token, token))
            else:  # some models also have the text of a control token in their vocabulary
                ids += self._letters(token)
        return ids

    def _letters(self, token: int) -> list[int]:
        """The ids of the text of a control token, encoded letter by letter."""
        guarded, _ = self._guarded
        letters = self._rust.id_to_token(token) or ""
        return [unit.id for letter in letters for unit in guarded.model.tokenize(letter)]

    @cached_property
    def _guarded(self) -> tuple[RustTokenizer, dict[int | None, int]]:
        """A second tokenizer that encodes control tokens as text, and a map of ids.

        The second tokenizer has an additional token with a unique name for each control token. The map is: id of the
        additional token → id of the control token.
        """
        rust = load(self._rust.to_str() if self._rust.encode_special_tokens else self._with_plain_words())
        rust.add_special_tokens([AddedToken(self._added[token].content, special=True) for token in self._ids])
        rust.encode_special_tokens = True
        rust.add_tokens([_named(token, self._added[token]) for token in self._ids])
        originals = {rust.token_to_id(unique_name(token)): token for token in self._ids}
        return rust, originals

    def _with_plain_words(self) -> str:
        """The tokenizer as JSON. Special tokens that do not control the model become tokens in any text."""
        text = self._rust.to_str()
        words = {token for token, entry in self._added.items() if entry.special} - self._ids
        if not words:
            return text
        value = json.loads(text)
        for entry in value["added_tokens"]:
            entry["special"] &= entry["id"] not in words
        return json.dumps(value)

    @cached_property
    def _tokens(self) -> tuple[Finder, dict[str, int]]:
        """Finds all added tokens, as the tokenizer does, and has their ids."""
        ids = {entry.content: token for token, entry in self._added.items()}
        tokens = [self._added[token] for token in sorted(self._added)]
        if self._rust.encode_special_tokens:  # `split_special_tokens`: the text of a special token is plain text
            tokens = [token for token in tokens if not token.special]
        return Finder(tokens, self._normalizer), ids

    def _with_names(self, marked: str) -> str:
        """The text without marks, and with unique names in place of the control tokens that are not marked."""
        plain, masked = unmark(marked)
        finder, ids = self._tokens
        segments = []
        position = 0
        for content, start, end in finder.find(masked):
            token = ids[content]
            if token in self._ids:
                segments += [plain[position:start], _renamed(plain[start:end], content, unique_name(token))]
                position = end
        return "".join([*segments, plain[position:]])


def _named(token: int, entry: AddedToken) -> AddedToken:
    """A token with a unique name, and with the white space of the token that it stands for."""
    return AddedToken(unique_name(token), lstrip=entry.lstrip, rstrip=entry.rstrip, normalized=entry.normalized)


def _renamed(text: str, content: str, name: str) -> str:
    """The text of a token with its name, in the white space that belongs to it. A normalised text may differ from the
    content of the token."""
    return text.replace(content if content in text else text.strip(), name, 1)


def _without_prefix(normalizer: Any) -> Any:
    """The JSON of a normalizer without the space that it writes before a text; None if nothing else is left."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] != "Sequence":
        return normalizer
    members = [rest for member in normalizer["normalizers"] if (rest := _without_prefix(member)) is not None]
    return {"type": "Sequence", "normalizers": members} if members else None
