"""The text of an answer as it arrives, for readers that are written as generators.

A reader yields while it needs more text. `Source.rest` is the text that no reader has taken yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields while it needs more text

_SPACE = " \t\r\n"
_WORD = re.compile(r"\S+?(?=(?<=[>\]])[\[{<]|\s|$)")


class NotACall(Exception):
    """The text at this place is no call of the format."""


class Source:
    """Text that arrives in pieces. The methods that return Steps wait for more text where they need it."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False  # no more text follows
        self.cut = False  # the text ended at a limit, not by itself
        self.starved = False  # a reader needed text after the end
        self._taken: list[str] | None = None  # the text taken since `mark`

    def mark(self) -> None:
        """Begin an attempt: `rewind` returns to this place until `commit`."""
        self._taken = []

    def rewind(self) -> None:
        """Return to the last `mark`, which stays valid."""
        assert self._taken is not None
        self.rest = "".join(self._taken) + self.rest
        self._taken = []

    def commit(self) -> None:
        """End the attempt: the taken text is read."""
        self._taken = None

    def take(self, count: int) -> str:
        """The next `count` characters, which must be in `rest`."""
        text = self.rest[:count]
        self.rest = self.rest[count:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def more(self) -> Steps[bool]:
        """Wait for more text. False if the text has ended."""
        size = len(self.rest)
        while len(self.rest) == size:
            if self.ended:
                self.starved = True
                return False
            yield
        return True

    def skip_space(self, more: str = "") -> Steps[None]:
        """Take white space, and the characters of `more`."""
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip(_SPACE + more)))
            if self.rest or not (yield from self.more()):
                return

    def accept(self, literal: str) -> Steps[bool]:
        """Take a literal text if it is next. White space between its words, and before them, may differ."""
        words = words_of(literal)
        while True:
            end = match_words(words, self.rest)
            if end is not None:
                self.take(max(end, 0))
                return end >= 0
            if not (yield from self.more()):
                return False

    def accept_end(self, literal: str) -> Steps[bool]:
        """Take a literal text if it is next, or its start if the text ends there. Nothing is next after no text."""
        if not literal:
            return False
        if (yield from self.accept(literal)):
            return True
        is_start = self.ended and match_words(words_of(literal), self.rest) is None
        self.take(len(self.rest) if is_start else 0)
        return is_start

    def expect(self, literal: str) -> Steps[None]:
        """Take a literal text. Raises NotACall if it is not next."""
        if not (yield from self.accept(literal)):
            raise NotACall

    def take_match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the longest match of a pattern. Raises NotACall if the text does not start with a match."""
        while True:
            match = pattern.match(self.rest)
            if match is None and self.rest:
                raise NotACall
            if match is not None and match.end() < len(self.rest):
                return self.take(match.end())
            if not (yield from self.more()):
                if match is None:
                    raise NotACall
                return self.take(match.end())

    def until(
        self,
        end: str,
        emit: Callable[[str], None],
        *,
        follows: Callable[[str], bool | None] = lambda _: True,
        hold: str = "",
    ) -> Steps[bool]:
        """Take text and pass it to `emit` as it arrives, up to `end`; take `end`. False if the text ends first.

        `follows` tells whether the text after an occurrence proves that it is the end; None: more text is needed.
        `hold`: a character that belongs to `end` if it is directly before it.
        """
        while True:
            index, is_certain = _find_end(self.rest, end, follows)
            if is_certain or (index >= 0 and self.ended):
                emit(self.take(index).removesuffix(hold))
                self.take(len(end))
                return True
            text = self.rest[: partial_start(self.rest, (end,)) if index < 0 else index]
            emit(self.take(len(text.removesuffix(hold))))
            if not (yield from self.more()) and index < 0:
                rest = self.take(len(self.rest))
                emit("" if self.cut else rest)  # a limit cut the text of `end`
                return False


def _find_end(text: str, end: str, follows: Callable[[str], bool | None]) -> tuple[int, bool]:
    """(index of the first occurrence of `end` that may be the end, or -1; whether the text after it proves that)."""
    index = text.find(end)
    while index >= 0:
        is_end = follows(text[index + len(end) :])
        if is_end is not False:
            return index, bool(is_end)
        index = text.find(end, index + 1)
    return -1, False


@cache
def words_of(literal: str) -> tuple[str, ...]:
    """The words of a literal, between which models may write white space."""
    return tuple(_WORD.findall(literal))


def match_words(words: Iterable[str], text: str) -> int | None:
    """The end of the words at the start of a text, with any white space before each word. -1: the text starts with
    other words. None: more text is needed."""
    position = 0
    for word in words:
        while position < len(text) and text[position] in _SPACE:
            position += 1
        available = text[position : position + len(word)]
        if available != word:
            return None if word.startswith(available) else -1
        position += len(word)
    return position


def partial_start(text: str, markers: Iterable[str]) -> int:
    """Index of an incomplete marker at the end of a text; len(text) if there is none."""
    longest = max(map(len, markers), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[start:]
        if any(marker.startswith(tail) and marker != tail for marker in markers):
            return start
    return len(text)


@dataclass
class Nesting:
    """Finds the end of a value with brackets and strings, in text that arrives in pieces.

    `quotes`: the texts that begin and end a string. `stops`: the characters that end a value outside of brackets. A
    value that begins with a bracket or quote also ends after the one that closes it, unless `stops_only`.
    """

    quotes: tuple[str, ...] = ('"',)
    escapes: bool = True  # a backslash in a string protects the next character
    stops: str = ",}] \t\r\n"
    stops_only: bool = False
    _depth: int = 0
    _quote: str = ""  # the quote of the open string
    _tokens: re.Pattern[str] = field(init=False)
    _partial: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        quotes = "|".join(map(re.escape, sorted(self.quotes, key=len, reverse=True)))
        escape = r"\\.|" if self.escapes else ""
        self._tokens = re.compile(rf"{escape}{quotes}|[\[\](){{}}]|[{re.escape(self.stops)}]", re.DOTALL)
        self._partial = (*self.quotes, "\\x") if self.escapes else self.quotes

    def scan(self, text: str, start: int, *, final: bool) -> tuple[int, int]:
        """(end of the value or -1, place from which to scan again when more text is there)."""
        safe = len(text) if final else partial_start(text, self._partial)
        for match in self._tokens.finditer(text, start):
            if match.start() >= safe:
                break
            end = self._step(match)
            if end >= 0:
                return end, end
            start = match.end()
        return -1, max(start, safe)

    def _step(self, match: re.Match[str]) -> int:
        token = match[0]
        if self._quote:
            self._quote = "" if token == self._quote else self._quote
            return -1 if self._quote else self._closed(match)
        if token in self.quotes:
            self._quote = token
        elif not self._depth and token in self.stops:
            return match.start()
        elif token in "[{(":
            self._depth += 1
        elif token in "]})":
            self._depth -= 1
            return self._closed(match)
        return -1

    def _closed(self, match: re.Match[str]) -> int:
        """The end of the value after a bracket or quote that closes it, or -1."""
        return -1 if self._depth or self.stops_only else match.end()
