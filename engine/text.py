"""Tokens into text as they come: never half a character, never a part of what may become a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
LONGEST_START = 3  # bytes that an incomplete UTF-8 character can have; no token is shorter than a byte
LONGEST_WINDOW = 16  # tokens without a clean end after which the window is cut anyhow


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain now, and how many tokens came out whole with it (in order, each counted once).

    Tokens without text of their own (special tokens) count with the text before them; `text` may be empty.
    """

    text: str
    tokens: int


class TextStream:
    """Detokenises one sequence. The pieces, joined, equal `decode` of all its tokens, cut before the stop string.

    `decode` turns token ids into text and writes U+FFFD for incomplete UTF-8, as Hugging Face tokenizers do. It is
    only ever given a short window, so the cost is linear in the number of tokens. Where bytes stay broken, up to
    three U+FFFD are held back, no more. The stop string that ends first wins; of those that end together, the longest.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Iterable[str] = ()) -> None:
        self._decode = decode
        self._stops = [_StopMatcher(text) for text in stop if text]
        self._window: list[int] = []  # [ context: a few tokens already handed on | fresh: since the last clean end ]
        self._fresh = 0
        self._shown = 0  # characters of decode(window) that went to the stop strings
        self._length = 0  # characters that went there in all
        self._held = ""  # of these, the last ones: they may become a stop string
        self._open = 0  # fresh tokens whose text is not certain yet
        self._ends: deque[int] = deque()  # of each certain, unreported token: the length at which its text ends
        self.stopped = False  # a stop string was found: the text is at its end

    def push(self, tokens: Sequence[int]) -> Piece:
        """Take in tokens. What follows a stop string is ignored; the piece that stops counts all tokens before."""
        text = ""
        for token in tokens:
            if not self.stopped:
                text += self._add(token)
        return self._piece(text)

    def finish(self) -> Piece:
        """No more tokens will come: what was held back."""
        text = ""
        if not self.stopped:
            text = self._screen(self._decode(self._window)[self._shown :])
        if not self.stopped:
            text += self._held
        self._held, self._window, self._shown = "", [], 0
        self._settle(self._open)
        return self._piece(text)

    def _add(self, token: int) -> str:
        self._window.append(token)
        self._fresh += 1
        self._open += 1
        text = self._decode(self._window)
        new = text[self._shown :]
        waiting = min(len(new) - len(new.rstrip(BROKEN)), LONGEST_START)
        certain = new[: len(new) - waiting]
        self._shown += len(certain)
        certain = self._screen(certain)
        if not waiting:
            self._settle(self._open)
            if new:
                self._keep(self._fresh, shown=None)
            elif self._fresh > LONGEST_WINDOW:  # tokens without text are no context for what follows
                self._window.pop()
                self._fresh -= 1
        elif self._fresh > LONGEST_WINDOW:
            certain += self._cut_broken(text, waiting)
        return certain

    def _keep(self, count: int, shown: int | None) -> None:
        """Let the window begin `count` tokens before its end; `shown` of its characters went on (None: all)."""
        del self._window[: len(self._window) - count]
        self._shown = len(self._decode(self._window)) if shown is None else shown
        self._fresh = 0 if shown is None else count

    def _cut_broken(self, text: str, waiting: int) -> str:
        """Shorten a window that has no clean end, where both sides of the cut decode alone as they do together.

        What is kept holds the whole start of a character that later tokens may complete.
        """
        for count in range(LONGEST_START, LONGEST_WINDOW):
            tail = self._decode(self._window[-count:])
            if len(tail) >= waiting and self._decode(self._window[:-count]) + tail == text:
                self._settle(self._open - count)
                self._keep(count, shown=len(tail) - waiting)
                return ""
        rest = self._screen(text[self._shown :])
        self._settle(self._open)
        self._keep(self._fresh, shown=None)
        return rest

    def _settle(self, count: int) -> None:
        """The text of the oldest `count` open tokens is certain."""
        self._ends.extend([self._length] * count)
        self._open -= count

    def _screen(self, text: str) -> str:
        """Pass text on, up to a stop string and without what may become one."""
        self._length += len(text)
        if not self._stops:
            return text
        known = len(self._held)
        text = self._held + text
        for index in range(known, len(text)):
            longest = max(stop.step(text[index]) for stop in self._stops)
            if longest:
                self.stopped, self._held = True, ""
                return text[: index + 1 - longest]
        hold = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _piece(self, text: str) -> Piece:
        if self.stopped:
            self._settle(self._open)
        count = 0
        while self._ends and (self.stopped or self._ends[0] <= self._length - len(self._held)):
            self._ends.popleft()
            count += 1
        return Piece(text, count)


class _StopMatcher:
    """Knuth, Morris and Pratt (1977): looks for one string, a character at a time."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = [0] * len(text)  # [i]: the longest proper prefix that also ends text[: i + 1]
        matched = 0
        for index in range(1, len(text)):
            matched = self._fallback[index] = self._next(matched, text[index])
        self.matched = 0  # characters of the string that end what was read

    def step(self, character: str) -> int:
        """Length of the string if it ends with this character, else 0. Not to be called after it was found."""
        self.matched = self._next(self.matched, character)
        return self.matched if self.matched == len(self._text) else 0

    def _next(self, matched: int, character: str) -> int:
        while matched and self._text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self._text[matched] == character)
