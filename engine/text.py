"""Streaming detokenisation, and stop strings. Never emits an incomplete character or a possible stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

BROKEN = "\ufffd"  # the character that decoders write for invalid or incomplete UTF-8
MAX_INCOMPLETE = 3  # maximum bytes of an incomplete UTF-8 character; a token has at least one byte
MAX_WINDOW = 16  # fresh tokens after which a window that ends inside a character is shortened
# Tokens of a shortened window. It may start inside a character, so its first 3 bytes may be invalid. The waiting text
# after them has at most MAX_INCOMPLETE characters of 3 bytes.
SHORT_WINDOW = MAX_INCOMPLETE + 3 * MAX_INCOMPLETE


class TextStream:
    """Detokenises one sequence. The joined texts equal `decode` of all tokens.

    `decode` converts token ids to text. More tokens may change only the U+FFFD at the end of the text (up to
    MAX_INCOMPLETE of them, for an incomplete character). Only these wait; all other text is emitted at once. The text
    of a token may depend on the bytes of an incomplete character before it, and on whether text precedes it.
    `decode` gets only a short window, so the cost is linear in the number of tokens.

    `before` are the tokens before the text (the end of a prompt that it continues). They are not part of the text, but
    some decoders drop the space of a first token.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, before: Sequence[int] = ()) -> None:
        self._decode = decode
        # [ context: a few tokens whose text was emitted | fresh: the tokens after them ]. A new window begins whenever
        # the text ends with a complete character.
        self._window: list[int] = list(before[-MAX_WINDOW:])
        self._fresh = 0
        context = decode(self._window) if self._window else ""
        self._emitted = context[: len(context) - _waiting(context)]  # the part of decode(window) that was emitted
        self._length = 0  # number of characters so far
        self._ends: deque[int] = deque()  # for each unreported token: maximum text length after it

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the new text."""
        return "".join(map(self._add, tokens))

    def finish(self) -> str:
        """End the text. Returns the remaining text that was held back."""
        text = self._decode(self._window)[len(self._emitted) :]
        self._length += len(text)
        self._window = []
        self._emitted = ""
        self._cap_ends(self._length)
        return text

    @property
    def is_complete(self) -> bool:
        """Whether the text so far ends with a complete character."""
        return len(self._decode(self._window)) == len(self._emitted)

    def settle(self, held: int = 0) -> int:
        """The number of tokens (in order, each counted once) whose text is complete, except the last `held` characters.
        A token without text (a special token) counts with the text before it."""
        count = 0
        while self._ends and self._ends[0] <= self._length - held:
            self._ends.popleft()
            count += 1
        return count

    def _add(self, token: int) -> str:
        self._window.append(token)
        self._fresh += 1
        text = self._decode(self._window)
        new = text[len(self._emitted) :]
        waiting = _waiting(new)
        is_long = self._fresh > MAX_WINDOW
        if waiting and not is_long and not text.startswith(self._emitted):
            # The tokenizers library temporarily drops complete characters before an incomplete one.
            waiting = len(new)
        else:
            self._emitted = text[: len(text) - waiting]
        text = new[: len(new) - waiting]
        self._length += len(text)
        self._cap_ends(self._length + waiting)
        self._ends.append(self._length + waiting)
        if new and not waiting:
            self._begin_window()
        elif is_long and waiting:
            self._shorten(waiting)
        elif is_long and not self._has_text(token):  # a token without text is useless as context
            self._window.pop()
            self._fresh -= 1
        return text

    def _begin_window(self) -> None:
        """Begin a new window, because the text ends with a complete character. The fresh tokens become its context."""
        self._window = self._window[-self._fresh :]
        self._emitted = self._decode(self._window)
        self._fresh = 0

    def _shorten(self, waiting: int) -> None:
        """Drop the oldest tokens of a window that became too long, because its text ends with an incomplete character.
        The last `waiting` characters of this text are not emitted yet."""
        self._window = [token for token in self._window if self._has_text(token)][-SHORT_WINDOW:]
        self._fresh = min(self._fresh, len(self._window))
        text = self._decode(self._window)
        self._emitted = text[: len(text) - waiting]

    def _has_text(self, token: int) -> bool:
        """Whether the token has text. Decodes the token twice in a row, because some decoders drop the space of the
        first token."""
        return bool(self._decode([token, token]))

    def _cap_ends(self, length: int) -> None:
        """Reduce each element of `_ends` to at most `length`."""
        late = 0
        while self._ends and self._ends[-1] > length:
            self._ends.pop()
            late += 1
        self._ends.extend([length] * late)


def _waiting(text: str) -> int:
    """Number of characters at the end of `text` that later tokens may change."""
    return min(len(text) - len(text.rstrip(BROKEN)), MAX_INCOMPLETE)


class StopFilter:
    """Ends a text before the first stop string.

    The stop string that ends first applies; of several that end at the same character, the longest.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stops = [_StopMatcher(text) for text in stop if text]
        self._tail = ""  # the last characters, which may start a stop string
        self.stop = ""  # the stop string that ended the text; empty: none

    @property
    def stopped(self) -> bool:
        return bool(self.stop)

    @property
    def held(self) -> int:
        """Number of characters that wait, because they may start a stop string."""
        return len(self._tail)

    def feed(self, text: str) -> str:
        """The text so far that is before any stop string; a possible start of one waits."""
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        start = len(self._tail)
        text = self._tail + text
        for index in range(start, len(text)):
            longest = max(stop.step(text[index]) for stop in self._stops)
            if longest:
                self.stop = text[index + 1 - longest : index + 1]
                self._tail = ""
                return text[: index + 1 - longest]
        matched = max(stop.matched for stop in self._stops)
        self._tail = text[len(text) - matched :]
        return text[: len(text) - matched]

    def finish(self) -> str:
        """End the text. Returns the text that waited."""
        text = self._tail
        self._tail = ""
        return text


class _StopMatcher:
    """Searches one string, character by character (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._fallback = [0] * len(text)  # [i]: length of the longest proper prefix that is a suffix of text[: i + 1]
        matched = 0
        for index in range(1, len(text)):
            matched = self._fallback[index] = self._next(matched, text[index])
        self.matched = 0  # length of the longest prefix of `text` that the input ends with

    def step(self, character: str) -> int:
        """The length of the string if this character completes it, otherwise 0. Do not call `step` after a match."""
        self.matched = self._next(self.matched, character)
        return self.matched if self.matched == len(self._text) else 0

    def _next(self, matched: int, character: str) -> int:
        while matched and self._text[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self._text[matched] == character)
