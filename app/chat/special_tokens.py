"""Encodes special tokens in the text of a message as plain text, so that they do not control the model."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

# Marks around a special token in the text of a message: `encode` treats the token between them as plain text.
# They are private-use characters of plane 15. No message needs them, so `protect` removes them from messages.
PROTECT = "\U000fff00"
RELEASE = "\U000fff01"
PROTECTED = re.compile(f"{PROTECT}([^{PROTECT}{RELEASE}]*){RELEASE}")
REMOVE_MARKS = str.maketrans("", "", PROTECT + RELEASE)


def load(tokenizer_json: str) -> RustTokenizer:
    """The tokenizer without truncation or padding. Raises Exception, as the library does."""
    rust = RustTokenizer.from_str(tokenizer_json)
    rust.no_truncation()
    rust.no_padding()
    return rust


def unique_name(token: int) -> str:
    """A unique text for a token. No message contains it, because `protect` removes its marks from messages."""
    return f"{PROTECT}{token}{RELEASE}"


def mark(special: re.Pattern[str], value: Any) -> Any:
    """A copy of JSON-like data, in whose strings the matches of a pattern are marked as plain text."""
    if isinstance(value, str):
        return special.sub(rf"{PROTECT}\g<0>{RELEASE}", value.translate(REMOVE_MARKS))
    if isinstance(value, dict):
        return {mark(special, key): mark(special, item) for key, item in value.items()}
    if isinstance(value, list):
        return [mark(special, item) for item in value]
    return value


class SpecialTokens:
    """The special tokens of one tokenizer."""

    def __init__(self, tokenizer_json: str, rust: RustTokenizer, unknown: str) -> None:
        """`unknown`: the unknown token (usually <unk>); empty if there is none."""
        added = rust.get_added_tokens_decoder()
        self.ids = frozenset(token for token, entry in added.items() if entry.special)
        self._tokenizer_json = tokenizer_json
        self._rust = rust
        self._entries = {token: added[token] for token in self.ids}
        self._id_of = {entry.content: token for token, entry in self._entries.items()}
        longest_first = sorted(map(re.escape, self._id_of), key=len, reverse=True)
        self._any = re.compile("|".join(longest_first) or "(?!)")
        self._control_ids = self.ids - {rust.token_to_id(unknown)}

    def protect(self, value: Any) -> Any:
        """A copy of JSON-like data; special tokens in its strings are marked as plain text."""
        return mark(self._any, value)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text in which special tokens are marked as plain text."""
        guarded, originals = self._guarded
        segments = [segment.translate(REMOVE_MARKS) for segment in PROTECTED.split(text)]
        segments[::2] = map(self._with_names, segments[::2])  # segments at odd indices are protected
        encoding = guarded.encode_batch_fast(["".join(segments)], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for token, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if is_added or token not in self._control_ids:
                ids.append(originals.get(token, token))
            else:  # a Unigram model encodes the text of a special token as that token
                ids += self._letters(token)
        return ids

    def _letters(self, token: int) -> list[int]:
        """The ids of the text of a special token, encoded letter by letter."""
        guarded, _ = self._guarded
        letters = self._rust.id_to_token(token) or ""
        return [unit.id for letter in letters for unit in guarded.model.tokenize(letter)]

    @cached_property
    def _guarded(self) -> tuple[RustTokenizer, dict[int | None, int]]:
        """A second tokenizer that encodes special tokens as text, and a map of ids.

        The second tokenizer has an additional token with a unique name for each special token. The map is: id of the
        additional token → id of the special token.
        """
        rust = load(self._tokenizer_json)
        rust.encode_special_tokens = True
        rust.add_tokens(
            [
                AddedToken(unique_name(token), lstrip=entry.lstrip, rstrip=entry.rstrip, normalized=False)
                for token, entry in self._entries.items()
            ]
        )
        originals = {rust.token_to_id(unique_name(token)): token for token in self.ids}
        return rust, originals

    def _with_names(self, text: str) -> str:
        """Replace special tokens by their unique names. A single-word token inside a longer word stays text."""

        def name(match: re.Match[str]) -> str:
            token = self._id_of[match[0]]
            start, end = match.span()
            inside_word = re.search(r"\w", text[max(start - 1, 0) : start] + text[end : end + 1])
            return match[0] if inside_word and self._entries[token].single_word else unique_name(token)

        return self._any.sub(name, text)
