"""Turns a model's text into answer, reasoning and tool calls while it streams.

Reasoning is Qwen's and DeepSeek's `<think>…</think>` at the start of an answer; tool calls are Hermes' and Qwen's
`<tool_call>{"name": …, "arguments": …}</tool_call>` anywhere after it. Markers may be split over any number of pieces.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Literal

import msgspec

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)  # of JSON, whole


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """A whole tool call; `arguments` is JSON text as the model wrote it."""

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
    """Feed text, get parts; `finish` gives what was held back.

    Nothing is lost: what turns out to be no marker, and a call that is not JSON with a name, comes out as text. Only
    white space beside the reasoning markers and after a tool call is dropped.
    """

    def __init__(self, *, reasoning: bool, tools: bool, inside_reasoning: bool = False, one_call: bool = False) -> None:
        """`inside_reasoning`: the prompt already ends in an opened `<think>`. `one_call`: the first call is the end."""
        self.calls = 0  # tool calls given so far
        self._tools, self._one_call = tools, one_call
        self._state: Literal["start", "reasoning", "text", "call", "over"] = "start" if reasoning else "text"
        if inside_reasoning:
            self._state = "reasoning"
        self._skip_space = inside_reasoning
        self._held = ""
        self._looked = 0  # where in it the end marker of a call may begin

    @property
    def over(self) -> bool:
        """The only call that is wanted was given: what follows is dropped."""
        return self._state == "over"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return _merged(parts)

    def finish(self) -> list[Part]:
        """The rest at the end of the output. A tool call that only lacks its end marker still is one."""
        parts: list[Part] = []
        while self._state == "call":
            self._end_call(len(self._held), parts)
            parts += self.feed("")
        held, self._held = self._held, ""
        if not held or self.over:
            return _merged(parts)
        if self._state == "reasoning":
            return [ReasoningPart(held)] if held.strip() else []
        return _merged([*parts, TextPart(held)])

    def _advance(self, parts: list[Part]) -> bool:
        """One transition over what is held; False when more text is needed."""
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
            self._held, self._state, self._skip_space = opening[len(THINK) :], "reasoning", True
        elif THINK.startswith(opening):
            return False
        else:
            self._state = "text"
        return True

    def _reasoning(self, parts: list[Part]) -> bool:
        thought, found, rest = self._held.partition(END_THINK)
        if found:
            self._held, self._state, self._skip_space = rest, "text", True
            thought = thought.rstrip()
        else:  # trailing white space goes with the end marker, should that follow
            keep = _marker_start(thought, END_THINK)
            keep = len(thought[:keep].rstrip())
            thought, self._held = thought[:keep], thought[keep:]
        if thought:
            parts.append(ReasoningPart(thought))
        return bool(found)

    def _text(self, parts: list[Part]) -> bool:
        if not self._tools:
            text, found, self._held = self._held, "", ""
        else:
            text, found, rest = self._held.partition(CALL)
            if found:
                self._held, self._state = rest, "call"
            else:
                keep = _marker_start(text, CALL)
                text, self._held = text[:keep], text[keep:]
        if text:
            parts.append(TextPart(text))
        return bool(found)

    def _end_call(self, end: int, parts: list[Part]) -> None:
        """What is held up to `end` is a call; if not, it is text up to the first end marker."""
        called = self._call(self._held[:end])
        if called is None and END_CALL in self._held:
            end = self._held.index(END_CALL)
        whole, self._held = self._held[: end + len(END_CALL)], self._held[end + len(END_CALL) :]
        parts.append(TextPart(CALL + whole) if called is None else called)
        self._skip_space, self._looked = called is not None, 0
        self._state = "over" if self.calls and self._one_call else "text"

    def _call(self, body: str) -> CallPart | None:
        try:
            call = msgspec.json.decode(body.strip(), type=_Call)
            arguments = bytes(call.arguments).decode()
            if arguments.startswith('"'):  # some models quote the object once more
                arguments = msgspec.json.decode(arguments, type=str)
            msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        self.calls += 1
        return CallPart(self.calls - 1, _new_id(), call.name, arguments)


def _call_end(text: str, start: int) -> int:
    """Where the end marker of a call begins, at `start` or later; -1: nowhere yet. One inside a JSON string is part of
    it."""
    end = text.find(END_CALL, start)
    while end >= 0 and '"' in _STRING.sub("", text[:end]):
        end = text.find(END_CALL, end + 1)
    return end


def _marker_start(text: str, marker: str) -> int:
    """Where a beginning of `marker` at the end of `text` starts; len(text) when there is none."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return len(text) - size
    return len(text)


def _merged(parts: list[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    merged: list[Part] = []
    for part in parts:
        if merged and isinstance(part, TextPart) and isinstance(merged[-1], TextPart):
            merged[-1] = TextPart(merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged
