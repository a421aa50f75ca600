"""Tokens into text as they come: never half a character, never a part of what may become a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

BROKEN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one
LONGEST_START = 3  # bytes that an incomplete UTF-8 character can have; no token is shorter than a byte
LONGEST_WINDOW = 16  # tokens without a clean end after which the window is shortened anyhow
# Tokens of a shortened window. It may begin within a character, which costs its first 3 bytes their meaning; the text
# that waits is at most LONGEST_START characters of 3 bytes each, whole behind them.
SHORT_WINDOW = LONGEST_START + 3 * LONGEST_START


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is certain now, and how many tokens came out whole with it (in order, each counted once).

    Tokens without text of their own (special tokens) count with the text before them; `text` may be empty.
    """

    text: str
    tokens: int


class TextStream:
    """Detokenises one sequence. The pieces, joined, equal `decode` of all its tokens, cut before the stop string.

    `decode` turns token ids into text. More tokens may change the end of the text only, and only U+FFFD there (up to
    LONGEST_START of them, for the bytes of an incomplete character): these are held back, nothing else is. What a token
    adds may depend on whether there is text before it, and on the bytes of an incomplete character before it.
    `decode` is only ever given a short window, so the cost is linear in the number of tokens.

    `before` are tokens that the text goes on from (the end of a prompt that it continues). They have no text here, but
    the first token is then decoded as one in the middle: some decoders drop the space of a first one.

    The stop string that ends first wins; of those that end together, the longest.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Iterable[str] = (), *, before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stops = [_StopMatcher(text) for text in stop if text]
        # [ context: a few tokens already handed on | fresh: since the last clean end ]
        self._window: list[int] = list(before[-LONGEST_WINDOW:])
        self._fresh = 0
        context = decode(self._window) if self._window else ""
        self._shown = context[: len(context) - _waiting(context)]  # of decode(window), what went to the stop strings
        self._length = 0  # characters that went there in all
        self._held = ""  # of these, the last ones: they may become a stop string
        self._ends: deque[int] = deque()  # of each unreported token: the length at which its text ends, at the latest
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
            text = self._screen(self._decode(self._window)[len(self._shown) :])
        if not self.stopped:
            text += self._held
        self._held, self._window, self._shown = "", [], ""
        self._settle(self._length)
        return self._piece(text)

    def _add(self, token: int) -> str:
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        new = text[len(self._shown) :]
        waiting = _waiting(new)
        if waiting and self._fresh <= LONGEST_WINDOW and not text.startswith(self._shown):
            # `tokenizers` takes back whole characters before an incomplete one, and gives them again.
            waiting = len(new)
        else:
            self._shown = text[: len(text) - waiting]
        certain = self._screen(new[: len(new) - waiting])
        self._settle(self._length + waiting)
        self._ends.append(self._length + waiting)
        if not waiting:
            if new:
                self._window = self._window[-self._fresh :]
                self._shown, self._fresh = self._decode(self._window), 0
            elif self._fresh > LONGEST_WINDOW and not self._has_text(token):  # no context for what follows
                self._window.pop()
                self._fresh -= 1
        elif self._fresh > LONGEST_WINDOW:
            self._shorten(waiting)
        return certain

    def _shorten(self, waiting: int) -> None:
        """Drop the oldest tokens of a window that has no clean end; `waiting` of its characters did not go on yet."""
        self._window = [token for token in self._window if self._has_text(token)][-SHORT_WINDOW:]
        self._fresh = min(self._fresh, len(self._window))
        text = self._decode(self._window)
        self._shown = text[: len(text) - waiting]

    def _has_text(self, token: int) -> bool:
        """Some have none as the first token only: a space that is dropped there."""
        return bool(self._decode([token, token]))

    def _settle(self, length: int) -> None:
        """The text of all tokens so far ends at `length`: that of none ends later."""
        late = 0
        while self._ends and self._ends[-1] > length:
            self._ends.pop()
            late += 1
        self._ends.extend([length] * late)

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
        count = 0
        while self._ends and (self.stopped or self._ends[0] <= self._length - len(self._held)):
            self._ends.popleft()
            count += 1
        return Piece(text, count)


def _waiting(text: str) -> int:
    """Characters at the end that later tokens may change."""
    return min(len(text) - len(text.rstrip(BROKEN)), LONGEST_START)


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
