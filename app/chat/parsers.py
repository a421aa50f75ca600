"""Splits the streamed text of a model into answer, reasoning and tool calls.

Reasoning is `<think>…</think>` at the start of an answer (Qwen, DeepSeek). A tool call is
`<tool_call>{"name": …, "arguments": …}</tool_call>` anywhere after it (Hermes, Qwen). A marker may be split over any
number of chunks of text.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Literal

import msgspec

THINK = "<think>"
END_THINK = "</think>"
CALL = "<tool_call>"
END_CALL = "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # a complete string of JSON


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call; `arguments` is the JSON text of the model, unchanged."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Output:
    """New text of an answer, new reasoning and new tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class _CallBody(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class OutputParser:
    """Call `feed` with each new text of the model and `finish` after the last one. `take` returns the new output.

    The start of a marker that does not complete, and a tool call that is not JSON with a name, become text. The parser
    drops only the markers, and white space beside the reasoning markers and after a tool call.
    """

    def __init__(self, *, reasoning: bool, tools: bool, inside_reasoning: bool = False, one_call: bool = False) -> None:
        """`inside_reasoning`: the prompt ends with an open `<think>`. `one_call`: drop text after the first call."""
        self.calls = 0  # number of tool calls so far
        self._tools = tools
        self._one_call = one_call
        self._state: Literal["start", "reasoning", "text", "call", "end"] = "start" if reasoning else "text"
        if inside_reasoning:
            self._state = "reasoning"
        self._skip_space = inside_reasoning
        self._pending = ""  # text that is in no output yet
        self._search_start = 0  # first position in `_pending` where the end marker of a call may start
        self._output = Output()

    @property
    def ended(self) -> bool:
        """True if `one_call` is set and the first call is complete; the parser drops the text that follows."""
        return self._state == "end"

    def take(self) -> Output:
        """The output since the last call of `take`."""
        output = self._output
        self._output = Output()
        return output

    def feed(self, text: str) -> None:
        self._pending += text
        while self._advance():
            pass

    def finish(self) -> None:
        """End the text: nothing stays pending. A tool call that lacks only its end marker counts as a call."""
        while self._state == "call":
            self._end_call(len(self._pending))
            self.feed("")
        if self._state == "reasoning" and self._pending.strip():
            self._output.reasoning += self._pending
        elif self._state in ("start", "text"):
            self._output.text += self._pending
        self._pending = ""

    def _advance(self) -> bool:
        """Make one transition of the state machine. False if it first needs more text."""
        if self._skip_space:
            self._pending = self._pending.lstrip()
            self._skip_space = not self._pending
        return not self._skip_space and _TRANSITIONS[self._state](self)

    def _in_start(self) -> bool:
        opening = self._pending.lstrip()
        if opening.startswith(THINK):
            self._pending = opening[len(THINK) :]
            self._state = "reasoning"
            self._skip_space = True
            return True
        if THINK.startswith(opening):
            return False
        self._state = "text"
        return True

    def _in_reasoning(self) -> bool:
        text, complete = self._take_before(END_THINK)
        thought = text.rstrip()
        self._output.reasoning += thought
        if complete:
            self._state = "text"
            self._skip_space = True
        else:  # keep trailing white space: the parser drops it if the end marker follows
            self._pending = text[len(thought) :] + self._pending
        return complete

    def _in_text(self) -> bool:
        if not self._tools:
            self._output.text += self._pending
            self._pending = ""
            return False
        text, complete = self._take_before(CALL)
        self._output.text += text
        if complete:
            self._state = "call"
        return complete

    def _in_call(self) -> bool:
        end = _call_end(self._pending, self._search_start)
        if end < 0:
            self._search_start = max(0, len(self._pending) - len(END_CALL) + 1)
            return False
        self._end_call(end)
        return True

    def _in_end(self) -> bool:
        return False

    def _take_before(self, marker: str) -> tuple[str, bool]:
        """Remove the text before a marker, and the marker, from the pending text. An incomplete marker stays pending.

        Returns the text, and True if the marker is complete.
        """
        text, complete, after = self._pending.partition(marker)
        if complete:
            self._pending = after
            return text, True
        start = _marker_start(text, marker)
        self._pending = text[start:]
        return text[:start], False

    def _end_call(self, end: int) -> None:
        """Parse the pending text up to `end` as a call.

        If it is not a call, it becomes text of the answer, up to and including the first end marker.
        """
        call = self._call(self._pending[:end])
        if call is None and END_CALL in self._pending:
            end = self._pending.index(END_CALL)
        after = end + len(END_CALL)
        if call is None:
            self._output.text += CALL + self._pending[:after]
        else:
            self._output.calls.append(call)
        self._pending = self._pending[after:]
        self._skip_space = call is not None
        self._search_start = 0
        self._state = "end" if self.calls and self._one_call else "text"

    def _call(self, body: str) -> Call | None:
        try:
            parsed = msgspec.json.decode(body.strip(), type=_CallBody)
            arguments = bytes(parsed.arguments).decode()
            if arguments.startswith('"'):  # some models write the object as a JSON string
                arguments = msgspec.json.decode(arguments, type=str)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        call = make_call(self.calls, parsed.name, arguments)
        self.calls += call is not None
        return call


_TRANSITIONS = {
    "start": OutputParser._in_start,
    "reasoning": OutputParser._in_reasoning,
    "text": OutputParser._in_text,
    "call": OutputParser._in_call,
    "end": OutputParser._in_end,
}


def make_call(index: int, name: str, arguments: str) -> Call | None:
    """A call with a new id; None if the arguments are not JSON."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return Call(index, f"call_{secrets.token_hex(12)}", name, arguments)


def _call_end(text: str, start: int) -> int:
    """Index of the first end marker of a call at `start` or later, outside JSON strings; -1 if there is none yet."""
    end = text.find(END_CALL, start)
    while end >= 0 and '"' in _STRING.sub("", text[:end]):
        end = text.find(END_CALL, end + 1)
    return end


def _marker_start(text: str, marker: str) -> int:
    """Index of an incomplete `marker` at the end of `text`; len(text) if there is none."""
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)
