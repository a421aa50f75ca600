"""The events of an answer, from the chunks of the API."""

from __future__ import annotations

from typing import Any

import msgspec

from ...engine.ranges import RANGES
from ..errors import InvalidRequest


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete tool call."""

    id: str
    name: str
    arguments: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of an answer."""

    finish: str  # stop, length or tool_calls
    usage: Usage
    ttft: float  # seconds from the request to the first token: `seconds` minus the decode time of the daemon
    seconds: float  # seconds from the request to the end

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first one per second of decoding; 0 if there is no second token."""
        span = self.seconds - self.ttft
        return (self.usage.completion_tokens - 1) / span if span > 0 else 0.0


ChatEvent = TextPiece | ReasoningPiece | ToolCall | Done


def adapter_selection(text: str) -> dict[str, Any]:
    """The entry of `lora` for NAME or NAME=SCALE. Raises InvalidRequest."""
    name, _, number = text.partition("=")
    limits = RANGES["adapter_scale"]
    try:
        scale = float(number) if "=" in text else 1.0
    except ValueError:
        scale = float("nan")
    if not name or scale not in limits:
        raise InvalidRequest(
            f"{text[:200]!r} is not NAME or NAME=SCALE", hint=f"the scale is {limits}", param="adapter"
        )
    return {"name": name, "scale": scale}


class Calls:
    """Joins streamed tool calls. A call is complete when the next one begins, or the answer ends."""

    def __init__(self) -> None:
        self._index = -1
        self._call = ToolCall(id="", name="", arguments="")

    def take(self, delta: dict[str, Any]) -> list[ToolCall]:
        complete = []
        if delta["index"] != self._index:
            complete = self.rest()
            self._index = delta["index"]
            self._call = ToolCall(id="", name="", arguments="")
        function = delta["function"]
        self._call = ToolCall(
            id=self._call.id + delta.get("id", ""),
            name=self._call.name + function.get("name", ""),
            arguments=self._call.arguments + function.get("arguments", ""),
        )
        return complete

    def rest(self) -> list[ToolCall]:
        return [] if self._index < 0 else [self._call]


def pieces(delta: dict[str, Any], calls: Calls) -> list[TextPiece | ReasoningPiece | ToolCall]:
    result: list[TextPiece | ReasoningPiece | ToolCall] = []
    if delta.get("reasoning"):
        result.append(ReasoningPiece(delta["reasoning"]))
    if delta.get("content"):
        result.append(TextPiece(delta["content"]))
    for call in delta.get("tool_calls", ()):
        result += calls.take(call)
    return result


def usage_of(report: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=report["prompt_tokens"],
        completion_tokens=report["completion_tokens"],
        cached_tokens=report["prompt_tokens_details"]["cached_tokens"],
    )
