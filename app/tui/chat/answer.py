"""Requests one answer and appends its text to a message. Independent of widgets."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

from ...client import ChatEvent, Done, ReasoningPiece, TextPiece, ToolCall
from ...errors import AdapterNotFound, AppError, ContextTooLong
from ..connection import Connection
from ..conversation import Conversation, Finish, Message
from ..text import clean, visible

Channel = Literal["text", "reasoning"]
_ADVICE = {
    ContextTooLong: "Try /new, a shorter message (/edit), or a model with a larger context (/model)",
    AdapterNotFound: "F5 lists and loads the adapters of the model",
}
_FINISHES: dict[str, Finish] = {"length": "length", "tool_calls": "tool_calls"}  # every other reason becomes "stop"


async def run(
    connection: Connection,
    conversation: Conversation,
    answer: Message,
    on_text: Callable[[Channel, str], None],
    parameters: dict[str, Any],
) -> None:
    """Request `answer`, append its text, and call `on_text` for each addition.

    Sets `finish`, unless the task is cancelled. An error of the daemon sets `finish="failed"` and `error`, and keeps
    the text so far.
    """
    try:
        client = await connection.client()
        if connection.running(answer.model) is None:
            await connection.use(answer.model)
        async with aclosing(client.chat(answer.model, conversation.request(answer), **parameters)) as events:
            async for event in events:
                _add(answer, event, on_text)
        if not answer.finish:
            raise AppError("The answer ended unexpectedly.")
    except AppError as error:
        connection.lost(error)
        answer.finish = "failed"
        answer.error = sentence(error)


def _add(answer: Message, event: ChatEvent, on_text: Callable[[Channel, str], None]) -> None:
    match event:
        case TextPiece(text):
            _append(answer, "text", text, on_text)
        case ReasoningPiece(text):
            _append(answer, "reasoning", text, on_text)
        case ToolCall():
            _append(answer, "text", _markdown(event), on_text)
        case Done():
            _finish(answer, event)


def _append(answer: Message, channel: Channel, text: str, on_text: Callable[[Channel, str], None]) -> None:
    text = clean(text)
    if channel == "text":
        answer.content += text
    else:
        answer.reasoning += text
    on_text(channel, text)


def sentence(error: AppError) -> str:
    """An error as text for the user: message, numbers, hint."""
    numbers = {name.replace("_", " "): str(value) for name, value in error.numbers.items()}
    missing = [f"{name} {value}" for name, value in numbers.items() if value not in error.message]
    message = error.message[0].upper() + error.message[1:]
    if missing:
        message += f" ({', '.join(missing)})"
    lines = [message, error.hint, _ADVICE.get(type(error), "")]
    return visible("\n".join(line.rstrip(".") + "." for line in lines if line))


def _finish(answer: Message, done: Done) -> None:
    answer.finish = _FINISHES.get(done.finish, "stop")
    answer.prompt_tokens = done.usage.prompt_tokens
    answer.completion_tokens = done.usage.completion_tokens
    answer.cached_tokens = done.usage.cached_tokens
    answer.ttft = done.ttft
    answer.seconds = done.seconds


def _markdown(call: ToolCall) -> str:
    """A tool call as a code block: this UI has no tools, so it shows the call."""
    return f"\n```json\n{json.dumps({'name': call.name, 'arguments': call.arguments}, indent=2)}\n```\n"
