"""Splits the streamed text of a model into answer, reasoning and tool calls.

Reasoning is `<think>…</think>` at the start of an answer (Qwen, DeepSeek). A tool call is
`<tool_call>{"name": …, "arguments": …}</tool_call>` anywhere after it (Hermes, Qwen). A marker may be split over any
number of pieces of text.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # a complete string of JSON


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A complete tool call; `arguments` is the JSON text of the model, unchanged."""

    index: int
    id: str
    name: str
    arguments: str


Part = TextPart | ReasoningPart | CallPart


class _Call(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """`feed` takes text and returns parts; `finish` returns the parts of the text that `feed` kept back.

    The start of a marker that does not complete, and a tool call that is not JSON with a name, become text. The parser
    drops only the markers, and white space beside the reasoning markers and after a tool call.
    """

    def __init__(self, *, reasoning: bool, tools: bool, inside_reasoning: bool = False, one_call: bool = False) -> None:
        """`inside_reasoning`: the prompt ends with an open `<think>`. `one_call`: drop text after the first call."""
        self.calls = 0  # number of tool calls so far
        self._tools = tools
        self._one_call = one_call
        self._state: Literal["start", "reasoning", "text", "call", "over"] = "start" if reasoning else "text"
        if inside_reasoning:
            self._state = "reasoning"
        self._skip_space = inside_reasoning
        self._held = ""  # text of no part yet
        self._looked = 0  # first position in `_held` where the end marker of a call may start

    @property
    def over(self) -> bool:
        """True after the only call of `one_call`; the parser drops the text that follows."""
        return self._state == "over"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return _merged(parts)

    def finish(self) -> list[Part]:
        """The last parts, at the end of the output. A tool call that lacks only its end marker counts as a call."""
        parts: list[Part] = []
        while self._state == "call":
            self._end_call(len(self._held), parts)
            parts += self.feed("")
        text = self._held
        self._held = ""
        if not text or self.over:
            return _merged(parts)
        if self._state == "reasoning":
            return [ReasoningPart(text)] if text.strip() else []
        return _merged([*parts, TextPart(text)])

    def _advance(self, parts: list[Part]) -> bool:
        """One transition of the state machine; False when it needs more text."""
        if self._skip_space:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._skip_space = False
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._reasoning(parts)
            case "text":
                return self._text(parts)
            case "call":
                end = _call_end(self._held, self._looked)
                if end < 0:
                    self._looked = max(0, len(self._held) - len(END_CALL) + 1)
                    return False
                self._end_call(end, parts)
                return True
            case "over":
                return False

    def _start(self) -> bool:
        opening = self._held.lstrip()
        if opening.startswith(THINK):
            self._held = opening[len(THINK) :]
            self._state = "reasoning"
            self._skip_space = True
        elif THINK.startswith(opening):
            return False
        else:
            self._state = "text"
        return True

    def _reasoning(self, parts: list[Part]) -> bool:
        thought, marker, after = self._held.partition(END_THINK)
        if marker:
            self._held = after
            self._state = "text"
            self._skip_space = True
            thought = thought.rstrip()
        else:  # keep back trailing white space: the parser drops it if the end marker follows
            complete = _marker_start(thought, END_THINK)
            complete = len(thought[:complete].rstrip())
            self._held = thought[complete:]
            thought = thought[:complete]
        if thought:
            parts.append(ReasoningPart(thought))
        return bool(marker)

    def _text(self, parts: list[Part]) -> bool:
        text = self._held
        marker = after = ""
        if self._tools:
            text, marker, after = text.partition(CALL)
        if marker:
            self._state = "call"
        elif self._tools:
            complete = _marker_start(text, CALL)
            after = text[complete:]
            text = text[:complete]
        self._held = after
        if text:
            parts.append(TextPart(text))
        return bool(marker)

    def _end_call(self, end: int, parts: list[Part]) -> None:
        """Take the held text up to `end` as a call. If it is none, the text up to the first end marker is text."""
        call = self._call(self._held[:end])
        if call is None and END_CALL in self._held:
            end = self._held.index(END_CALL)
        after = end + len(END_CALL)
        parts.append(TextPart(CALL + self._held[:after]) if call is None else call)
        self._held = self._held[after:]
        self._skip_space = call is not None
        self._looked = 0
        self._state = "over" if self.calls and self._one_call else "text"

    def _call(self, body: str) -> CallPart | None:
        try:
            call = msgspec.json.decode(body.strip(), type=_Call)
            arguments = bytes(call.arguments).decode()
            if arguments.startswith('"'):  # some models write the object as a JSON string
                arguments = msgspec.json.decode(arguments, type=str)
            msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        self.calls += 1
        return CallPart(self.calls - 1, _new_id(), call.name, arguments)


def _call_end(text: str, start: int) -> int:
    """Index of the first end marker of a call at `start` or later, outside JSON strings; -1 if there is none yet."""
    end = text.find(END_CALL, start)
    while end >= 0 and '"' in _STRING.sub("", text[:end]):
        end = text.find(END_CALL, end + 1)
    return end


def _marker_start(text: str, marker: str) -> int:
    """Index where `text` ends with an incomplete `marker`; len(text) if it does not."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return len(text) - size
    return len(text)


def _merged(parts: list[Part]) -> list[Part]:
    """Join text parts that follow each other."""
    merged: list[Part] = []
    for part in parts:
        if merged and isinstance(part, TextPart) and isinstance(merged[-1], TextPart):
            merged[-1] = TextPart(merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged
