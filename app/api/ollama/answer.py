"""Writes the answers of Ollama's chats and completions: a JSON document, or a stream of one JSON document per line."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ...errors import AppError
from ...frames import Piece, PieceLogprob, ToolCallPiece
from ..answers import Answer, Framing, Head
from ..exchange import Asked, Protocol
from ..inputs import TargetBody
from ..openai import ChatBody
from ..replies import UsageReport
from ..stream import Stream
from .bodies import GenerateBody, OllamaChatBody, plain_name
from .errors import error_body

LINES = Framing(b"application/x-ndjson", b"")  # clients decode every line, so nothing keeps a silent connection
Kind = Literal["chat", "generate"]
_encode = msgspec.json.Encoder().encode


def now() -> str:
    """The time in Go's form of RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Clock:
    """The durations of an answer in nanoseconds."""

    def __init__(self) -> None:
        self._asked = self._accepted = self._first = time.perf_counter_ns()

    def accept(self) -> None:
        self._accepted = self._first = time.perf_counter_ns()

    def begin(self) -> None:
        if self._first == self._accepted:
            self._first = time.perf_counter_ns()

    def report(self, usage: UsageReport) -> dict[str, int]:
        return {
            "total_duration": time.perf_counter_ns() - self._asked,
            "load_duration": self._accepted - self._asked,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._first - self._accepted,
            "eval_count": usage.completion_tokens,
            "eval_duration": round(usage.decode_seconds * 1e9),
        }


class OllamaAnswer:
    """The answer of one choice. `finish`: the reason of an end without an answer, `load` or `unload`."""

    framing = LINES

    def __init__(self, kind: Kind, model: str, clock: _Clock, *, logprobs: bool = False, finish: str = "") -> None:
        self._kind: Kind = kind
        self._model = model
        self._clock = clock
        self._logprobs = logprobs
        self._finish = finish
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._entries: list[PieceLogprob] = []
        self._calls: list[ToolCallPiece] = []  # those whose arguments may not be complete
        clock.accept()

    def opening(self) -> bytes:
        return b""

    def part(self, choice: int, piece: Piece) -> bytes:
        self._take(piece)
        calls = self._complete_calls(all_of_them=bool(piece.finish))
        if not (piece.text or piece.reasoning or calls or piece.logprobs):
            return b""
        record = self._record(piece.text, piece.reasoning, calls, piece.logprobs)
        return _encode(record | {"done": False}) + b"\n"

    def closing(self, usage: UsageReport) -> bytes:
        return self._end(self._record("", "", [], []), usage) + b"\n"

    def failure(self, error: AppError) -> bytes:
        return error_body(error) + b"\n"

    def take(self, choice: int, piece: Piece) -> None:
        self._take(piece)
        self._text.append(piece.text)
        self._thinking.append(piece.reasoning)
        self._entries += piece.logprobs

    def document(self, usage: UsageReport) -> bytes:
        calls = self._complete_calls(all_of_them=True)
        return self._end(self._record("".join(self._text), "".join(self._thinking), calls, self._entries), usage)

    def _take(self, piece: Piece) -> None:
        self._clock.begin()
        for call in piece.tool_calls:
            if call.name or call.id:
                self._calls.append(ToolCallPiece(index=call.index, id=call.id, name=call.name))
            self._calls[-1].arguments += call.arguments
        if piece.finish:
            self._finish = "length" if piece.finish == "length" else "stop"

    def _complete_calls(self, *, all_of_them: bool) -> list[dict[str, Any]]:
        """The complete calls: those before the start of the next call, and all at the end of the answer."""
        count = len(self._calls) if all_of_them else len(self._calls) - 1
        complete, self._calls = self._calls[: max(count, 0)], self._calls[max(count, 0) :]
        return [
            {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": _arguments(call)}}
            for call in complete
        ]

    def _record(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: list[PieceLogprob]
    ) -> dict[str, Any]:
        record: dict[str, Any] = {"model": self._model, "created_at": now()}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._kind == "generate":
            record |= {"response": text, **more}
        else:
            record["message"] = {"role": "assistant", "content": text, **more}
            if calls:
                record["message"]["tool_calls"] = calls
        if self._logprobs and logprobs:
            record["logprobs"] = [
                _logprob(entry) | {"top_logprobs": list(map(_logprob, entry.top))} for entry in logprobs
            ]
        return record

    def _end(self, record: dict[str, Any], usage: UsageReport) -> bytes:
        if not self._finish:
            raise AppError("the engine ended an answer without a finish reason")
        return _encode(record | {"done": True, "done_reason": self._finish} | self._clock.report(usage))


def _arguments(call: ToolCallPiece) -> Any:
    """The arguments as an object; those that the model wrote as no object stay a text."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        return {"": call.arguments}
    return arguments if isinstance(arguments, dict) else {"": arguments}


def _logprob(entry: PieceLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": max(entry.logprob, -9999.0), "bytes": entry.bytes}


def _ask(body: OllamaChatBody | GenerateBody, kind: Kind) -> Asked:
    identifier = f"{kind}-{uuid.uuid4().hex}"
    clock = _Clock()
    converted = body.openai()
    lifetime = body.lifetime
    target: TargetBody = converted or TargetBody(model=plain_name(body.model), keep_alive=body.keep_alive)
    empty = "" if converted else "unload" if lifetime == 0 else "load"

    def answer(head: Head, stream: Stream) -> Answer:
        return OllamaAnswer(kind, body.model, clock, logprobs=bool(body.logprobs), finish=empty)

    return Asked(
        identifier,
        target,
        converted.frames(identifier) if converted else [],
        body.stream is not False,
        answer,
        fields=_fields if isinstance(converted, ChatBody) else lambda names: names,
    )


def _fields(names: Any) -> list[str]:
    return [{"reasoning": "think"}.get(name, name) for name in names]


CHAT = Protocol(OllamaChatBody, lambda body: _ask(body, "chat"))
GENERATE = Protocol(GenerateBody, lambda body: _ask(body, "generate"))
