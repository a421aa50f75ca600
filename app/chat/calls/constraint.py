"""Constrains the calls of an answer, and leaves its other text free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ....engine.grammar import all_tokens
from .reading import Watch
from .records import CallFormat


class CallReader(Protocol):
    """A reader of the answer, which tells where calls begin and end."""

    def push(self, tokens: Sequence[int], /) -> int: ...

    @property
    def in_calls(self) -> bool:
        """Whether the text so far ends inside a group of calls."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text so far ends with a complete character."""
        ...


@dataclass(frozen=True)
class CallGrammars:
    """The grammars of the rest of a call in one format. Without a marker, the rest is known with the name of the tool;
    otherwise the name is empty, and the rest follows the text before the first call of a group."""

    form: CallFormat
    rests: Mapping[str, LLMatcher]  # by the name of the tool
    vocab_size: int
    is_strict: bool  # whether a failure of the grammar ends the answer


class LazyGrammar:
    """Implements engine.grammar.Grammar for an answer that may have calls.

    A reader of the answer finds where a call begins. From there, a matcher allows only the tokens of a call.
    """

    def __init__(
        self, grammars: CallGrammars, start: Callable[[Watch], CallReader], encode: Callable[[str], list[int]]
    ) -> None:
        """`start` begins to read an answer. `encode`: the ids of a text with markers."""
        self._grammars = grammars
        self._start = start
        self._encode = encode
        self._reader = start(self._watch)
        self._accepted = 0
        self._matcher: LLMatcher | None = None
        self._begun: tuple[LLMatcher, str] | None = None  # the rest of a call that the last token began, and its text

    def copy(self) -> LazyGrammar | Ahead:
        """An independent grammar in the same state."""
        if not self._accepted:
            return LazyGrammar(self._grammars, self._start, self._encode)
        return Ahead(self._grammars.vocab_size, self._matcher.deep_copy() if self._matcher else None)

    def allowed(self) -> NDArray[np.uint32]:
        return _allowed(self._matcher, self._grammars.vocab_size)

    def accept(self, token: int) -> None:
        self._accepted += 1
        if self._matcher is not None:
            self._matcher = _advance(self._matcher, [token], strict=self._grammars.is_strict)
        self._begun = None
        self._reader.push([token])
        if not self._reader.in_calls:
            self._matcher = None
        elif self._begun is not None and self._reader.is_complete:
            matcher, text = self._begun
            self._matcher = _advance(matcher, self._encode(text), strict=False)

    @property
    def finished(self) -> bool:
        return False

    def _watch(self, form: CallFormat, name: str, rest: str) -> None:
        key = name if form.at_start else ""
        matcher = self._grammars.rests.get(key)
        if form is self._grammars.form and matcher is not None and bool(name) == form.at_start:
            self._begun = (matcher.deep_copy(), rest)


class Ahead:
    """A grammar for drafts after a LazyGrammar. A draft after a call is not known to be free, so drafts end there."""

    def __init__(self, vocab_size: int, matcher: LLMatcher | None) -> None:
        self._vocab_size = vocab_size
        self._matcher = matcher

    def copy(self) -> Ahead:
        return Ahead(self._vocab_size, self._matcher.deep_copy() if self._matcher else None)

    def allowed(self) -> NDArray[np.uint32]:
        return _allowed(self._matcher, self._vocab_size)

    def accept(self, token: int) -> None:
        """Raises ValueError if the token may begin or end a call."""
        if self._matcher is None:
            raise ValueError("a call may begin at any token")
        self._matcher = _advance(self._matcher, [token], strict=True)

    @property
    def finished(self) -> bool:
        return False


def _allowed(matcher: LLMatcher | None, vocab_size: int) -> NDArray[np.uint32]:
    if matcher is None:
        return all_tokens(vocab_size)
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: -(-vocab_size // 32)]


def _advance(matcher: LLMatcher, tokens: list[int], *, strict: bool) -> LLMatcher | None:
    """The matcher after the tokens; None if the call is complete.

    Tokens that are no such call raise ValueError if `strict`; otherwise they end the constraint."""
    consumed = matcher.try_consume_tokens(tokens)
    if matcher.is_error() or consumed < len(tokens):
        if strict:
            raise ValueError(matcher.get_error().split("\n")[0] or "the token is not allowed")
        return None
    return None if matcher.is_stopped() else matcher
