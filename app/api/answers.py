"""Builds the replies of an API from the pieces of a worker: one JSON document or a stream. Here: OpenAI's chats and
completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from ..errors import AppError
from ..frames import Piece, PieceLogprob, ToolCallPiece
from . import keep_alive
from .replies import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Chunk,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    ToolCallDelta,
    ToolCallReport,
    TopLogprob,
    UsageReport,
    error_body,
)
from .token_text import BROKEN, TextOffsets, spelling

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # replaces -inf, which JSON cannot express

# Characters at which some clients split lines, although JSON strings may contain them. They are escaped.
_BREAKS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))
_encode = msgspec.json.Encoder().encode


def named_event(value: msgspec.Struct) -> bytes:
    """One server-sent event, with the tag of its type as name."""
    return f"event: {value.__struct_config__.tag}\n".encode() + event(value)


def event(value: object) -> bytes:
    """One server-sent event."""
    body = _encode(value)
    if not body.isascii():
        for raw, escaped in _BREAKS:
            body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


def error_event(error: AppError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every event of one answer has."""

    id: str
    model: str
    fingerprint: str
    warnings: Sequence[str] = ()
    prompt_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self) -> dict[str, Any]:
        fields = {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}
        return fields | {"warnings": list(self.warnings)} if self.warnings else fields


@dataclass(frozen=True, slots=True)
class Framing:
    """The form of a stream: its content type, and the bytes that keep a silent connection."""

    media: bytes
    idle: bytes


SERVER_SENT = Framing(b"text/event-stream; charset=utf-8", keep_alive.COMMENT)


class Answer(Protocol):
    """Converts the pieces of an answer to the bytes of the response.

    For a stream: call `opening`, then `part` for each piece, then `closing`; after an error, `failure`. For one
    document: call `take` for each piece, then `document`.
    """

    @property
    def framing(self) -> Framing: ...

    def opening(self) -> bytes: ...

    def part(self, choice: int, piece: Piece) -> bytes: ...

    def closing(self, usage: UsageReport) -> bytes: ...

    def failure(self, error: AppError) -> bytes: ...

    def take(self, choice: int, piece: Piece) -> None: ...

    def document(self, usage: UsageReport) -> bytes: ...


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, ToolCallReport] = field(default_factory=dict)
    logprobs: list[PieceLogprob] = field(default_factory=list)
    finish: str | None = None

    def take(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.reasoning.append(piece.reasoning)
        self.logprobs += piece.logprobs
        for call in piece.tool_calls:
            report = self.calls.setdefault(call.index, ToolCallReport(id="", function=FunctionCall("", "")))
            report.id += call.id
            report.function.name += call.name
            report.function.arguments += call.arguments
        self.finish = piece.finish or self.finish


class ChatAnswer:
    """Answers of /v1/chat/completions."""

    framing = SERVER_SENT

    def __init__(self, head: Head, choices: int, *, logprobs: bool, usage: bool) -> None:
        self._head = head.fields()
        self._logprobs = logprobs
        self._usage = usage
        self._choices = [_Choice() for _ in range(choices)]
        self._event = Chunk(**self._head, choices=[], usage=_no_usage(usage))  # filled for each event

    def opening(self) -> bytes:
        role = Delta(role="assistant", content="")
        return b"".join(self._chunk(ChunkChoice(index, role)) for index in range(len(self._choices)))

    def part(self, choice: int, piece: Piece) -> bytes:
        events = b""
        if piece.text or piece.reasoning or piece.tool_calls or piece.logprobs:
            events = self._chunk(ChunkChoice(choice, _chat_delta(piece), self._report(piece.logprobs)))
        if piece.finish:
            self._choices[choice].finish = piece.finish
            events += self._chunk(ChunkChoice(choice, Delta(), None, piece.finish))
        return events

    def closing(self, usage: UsageReport) -> bytes:
        _check_finished(self._choices)
        if not self._usage:
            return DONE
        return event(Chunk(**self._head, choices=[], usage=usage)) + DONE

    def failure(self, error: AppError) -> bytes:
        return error_event(error)

    def take(self, choice: int, piece: Piece) -> None:
        self._choices[choice].take(piece)

    def document(self, usage: UsageReport) -> bytes:
        _check_finished(self._choices)
        choices = [self._full_choice(index, choice) for index, choice in enumerate(self._choices)]
        return _encode(ChatCompletion(**self._head, choices=choices, usage=usage))

    def _chunk(self, choice: ChunkChoice) -> bytes:
        self._event.choices = [choice]
        return event(self._event)

    def _full_choice(self, index: int, choice: _Choice) -> ChatChoice:
        text = "".join(choice.text)
        reasoning = "".join(choice.reasoning)
        message = ChatMessage(content=text)
        if choice.calls:
            message.content = text or None
            message.tool_calls = [choice.calls[number] for number in sorted(choice.calls)]
        if reasoning:
            message.reasoning = reasoning
            message.reasoning_content = reasoning
        return ChatChoice(index, message, self._report(choice.logprobs), choice.finish)

    def _report(self, logprobs: list[PieceLogprob]) -> ChatLogprobs | None:
        """The log-probabilities in OpenAI's format; None if there are none, or the client did not request them."""
        if not self._logprobs or not logprobs:
            return None
        return ChatLogprobs([token_logprob(entry) for entry in logprobs])


@dataclass(frozen=True, slots=True)
class Best:
    """Of each `count` choices of a prompt, the `kept` likeliest are in the answer."""

    count: int
    kept: int


class CompletionAnswer:
    """Answers of /v1/completions."""

    framing = SERVER_SENT

    def __init__(self, head: Head, choices: int, *, logprobs: bool, usage: bool, best: Best | None = None) -> None:
        self._head = head.fields()
        self._logprobs = logprobs
        self._usage = usage
        self._choices = [_Choice() for _ in range(choices)]
        self._reports = [TextLogprobs([], [], [], []) for _ in range(choices)]
        self._offsets = [TextOffsets() for _ in range(choices)]
        self._best = best
        self._event = TextCompletion(**self._head, choices=[], usage=_no_usage(usage))  # filled for each event

    def opening(self) -> bytes:
        return b""

    def part(self, choice: int, piece: Piece) -> bytes:
        if not (piece.text or piece.logprobs or piece.finish):
            return b""
        self._choices[choice].finish = piece.finish
        report = None
        if self._logprobs:
            report = TextLogprobs([], [], [], [])
            self._add(report, choice, piece)
        self._event.choices = [TextChoice(choice, piece.text, report, piece.finish)]
        return event(self._event)

    def closing(self, usage: UsageReport) -> bytes:
        _check_finished(self._choices)
        if not self._usage:
            return DONE
        return event(TextCompletion(**self._head, choices=[], usage=usage)) + DONE

    def failure(self, error: AppError) -> bytes:
        return error_event(error)

    def take(self, choice: int, piece: Piece) -> None:
        self._choices[choice].take(piece)
        self._add(self._reports[choice], choice, piece)

    def document(self, usage: UsageReport) -> bytes:
        _check_finished(self._choices)
        choices = [self._full_choice(number, index) for number, index in enumerate(self._shown_choices())]
        return _encode(TextCompletion(**self._head, choices=choices, usage=usage))

    def _shown_choices(self) -> list[int]:
        """The indices of the choices in the answer."""
        indices = list(range(len(self._choices)))
        if self._best is None:
            return indices
        groups = [indices[start : start + self._best.count] for start in range(0, len(indices), self._best.count)]
        return [index for group in groups for index in sorted(group, key=self._likelihood)[: self._best.kept]]

    def _likelihood(self, index: int) -> float:
        """The negative mean log-probability of the tokens of a choice, to sort the likeliest one first."""
        logprobs = [entry.logprob for entry in self._choices[index].logprobs if not isnan(entry.logprob)]
        return -sum(logprobs) / max(len(logprobs), 1)

    def _full_choice(self, number: int, index: int) -> TextChoice:
        choice = self._choices[index]
        return TextChoice(number, "".join(choice.text), self._shown(self._reports[index]), choice.finish)

    def _shown(self, report: TextLogprobs) -> TextLogprobs | None:
        """The log-probabilities; None if the client did not request them."""
        return report if self._logprobs else None

    def _add(self, report: TextLogprobs, choice: int, piece: Piece) -> None:
        """Add the log-probabilities of a piece to a report in OpenAI's format."""
        if not self._logprobs:
            return
        offsets = self._offsets[choice]
        offsets.add(piece.text)
        for entry in piece.logprobs:
            report.tokens.append(_spelling(entry))
            is_first = isnan(entry.logprob)  # of an echoed prompt
            report.token_logprobs.append(None if is_first else _finite(entry.logprob))
            report.top_logprobs.append(None if is_first else _alternatives(entry))
            report.text_offset.append(offsets.of(bytes(entry.bytes)))


def _no_usage(announced: bool) -> UnsetType | None:
    """The field `usage` of every event except the last: null if the last event will report the usage, else absent."""
    return None if announced else UNSET


def _check_finished(choices: list[_Choice]) -> None:
    """Raises AppError if a choice has no finish reason, which a worker must always send."""
    if not all(choice.finish for choice in choices):
        raise AppError("the engine ended an answer without a finish reason")


def _chat_delta(piece: Piece) -> Delta:
    delta = Delta()
    if piece.text or piece.logprobs:
        delta.content = piece.text
    if piece.reasoning:
        delta.reasoning = piece.reasoning
        delta.reasoning_content = piece.reasoning
    if piece.tool_calls:
        delta.tool_calls = [_call_delta(call) for call in piece.tool_calls]
    return delta


def _call_delta(call: ToolCallPiece) -> ToolCallDelta:
    """One delta of a tool call; only the first delta of a call has id, type and name."""
    delta = ToolCallDelta(index=call.index, function=FunctionDelta(arguments=call.arguments))
    if call.id or call.name:
        delta.id = call.id
        delta.type = "function"
        delta.function.name = call.name
    return delta


def token_logprob(entry: PieceLogprob) -> TokenLogprob:
    top = [TopLogprob(_spelling(other), _finite(other.logprob), other.bytes) for other in entry.top]
    return TokenLogprob(_spelling(entry), _finite(entry.logprob), entry.bytes, top)


def _spelling(entry: PieceLogprob) -> str:
    """The text of a token; the worker writes U+FFFD for bytes that are no complete text."""
    return spelling(bytes(entry.bytes)) if BROKEN in entry.token else entry.token


def _alternatives(entry: PieceLogprob) -> dict[str, float]:
    """The log-probabilities of the likeliest tokens and of the sampled token, by spelling.

    A token with the spelling of another one has the key `token_id:ID`, as in vLLM. The sampled token has its spelling.
    """
    sampled = _spelling(entry)
    report: dict[str, float] = {}
    for other in entry.top:
        name = _spelling(other)
        if other.id != entry.id:
            if name in report or name == sampled:
                name = f"token_id:{other.id}"
            while name in report or name == sampled:  # the text of a token may look like such a key
                name = f"token_id:{name}"
        report[name] = _finite(other.logprob)
    report[sampled] = _finite(entry.logprob)
    return report


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
