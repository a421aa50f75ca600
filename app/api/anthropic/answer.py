"""Writes a message of Anthropic's API from the pieces of an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from ...errors import AppError
from ...frames import Piece
from ..answers import SERVER_SENT, Framing, Head, named_event
from ..parts import Event, Part, Parts
from ..replies import UsageReport
from . import replies
from .replies import BlockDelta, BlockStart, BlockStop, Ending, MessageUsage

SIGNATURE = "localllm"  # clients keep only signed reasoning
PING = named_event(replies.Ping())


class MessageAnswer:
    """The answer to POST /v1/messages. `max_tokens`: the limit of the request."""

    framing = Framing(SERVER_SENT.media, PING)

    def __init__(self, head: Head, max_tokens: int) -> None:
        self._head = head
        self._max_tokens = max_tokens
        self._parts = Parts()

    def opening(self) -> bytes:
        message = self._message([], MessageUsage(input_tokens=self._head.prompt_tokens))
        return named_event(replies.MessageStart(message))

    def part(self, choice: int, piece: Piece) -> bytes:
        return _events(self._parts.take(piece))

    def closing(self, usage: UsageReport) -> bytes:
        ends = _events(self._parts.close())
        delta = replies.MessageDelta(self._ending(usage), _usage(usage))
        return ends + named_event(delta) + named_event(replies.MessageStop())

    def failure(self, error: AppError) -> bytes:
        return named_event(replies.error_of(error))

    def take(self, choice: int, piece: Piece) -> None:
        for _ in self._parts.take(piece):
            pass

    def document(self, usage: UsageReport) -> bytes:
        list(self._parts.close())
        blocks = [block for part in self._parts.parts if (block := _block(part)) is not None]
        message = self._message(blocks, _usage(usage))
        ending = self._ending(usage)
        message.stop_reason, message.stop_sequence = ending.stop_reason, ending.stop_sequence
        return msgspec.json.encode(message)

    def _message(self, content: list[replies.Block], usage: MessageUsage) -> replies.MessageReply:
        head = self._head
        warnings = list(head.warnings) or UNSET
        return replies.MessageReply(id=head.id, model=head.model, content=content, usage=usage, warnings=warnings)

    def _ending(self, usage: UsageReport) -> Ending:
        match self._parts.finish:
            case "tool_calls":
                return Ending("tool_use", None)
            case "length" if usage.completion_tokens < self._max_tokens:
                return Ending("model_context_window_exceeded", None)
            case "length":
                return Ending("max_tokens", None)
        return Ending("stop_sequence", self._parts.stop) if self._parts.stop else Ending("end_turn", None)


def _usage(usage: UsageReport) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _events(changes: Iterable[Event]) -> bytes:
    return b"".join(b"".join(_change(change, part)) for change, part in changes)


def _change(change: str, part: Part) -> Iterable[bytes]:
    """The events of one change of a part."""
    match change, part.kind:
        case "begin", _:
            yield named_event(BlockStart(part.index, _start(part)))
        case "add", _:
            yield named_event(BlockDelta(part.index, _delta(part)))
        case "end", kind:
            if kind == "reasoning":
                signature = BlockDelta(part.index, replies.SignatureDelta(SIGNATURE))
                yield named_event(signature)
            yield named_event(BlockStop(part.index))


def _start(part: Part) -> replies.Block:
    match part.kind:
        case "reasoning":
            return replies.Thinking()
        case "text":
            return replies.Text()
    return replies.ToolUse(part.call_id, part.name, {})


def _delta(part: Part) -> replies.TextDelta | replies.ThinkingDelta | replies.InputDelta:
    match part.kind:
        case "reasoning":
            return replies.ThinkingDelta(part.new)
        case "text":
            return replies.TextDelta(part.new)
    return replies.InputDelta(part.new)


def _block(part: Part) -> replies.Block | None:
    """The block of a part; None for a call that the limit of tokens has cut: a client must not run it."""
    match part.kind:
        case "reasoning":
            return replies.Thinking(part.text, SIGNATURE)
        case "text":
            return replies.Text(part.text)
    try:
        arguments = msgspec.json.decode(part.text)
    except msgspec.DecodeError:
        return None
    return replies.ToolUse(part.call_id, part.name, arguments)
