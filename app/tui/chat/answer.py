"""Requests one answer and appends its text to a message. Independent of widgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

from ...client import Done, ReasoningPiece, TextPiece, ToolCall
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
    """Request `answer`, append its text, and call `on_text` for each addition. Always sets `finish`.

    An error of the daemon sets `finish="failed"` and `error`, and keeps the text so far. Cancelling the task cancels
    the request, sets `finish="stopped"` and raises CancelledError.
    """
    try:
        await _request(connection, conversation, answer, on_text, parameters)
        if not answer.finish:
            answer.finish = "failed"
            answer.error = "The answer ended unexpectedly."
    except asyncio.CancelledError:
        answer.finish = answer.finish or "stopped"
        raise
    except AppError as error:
        connection.lost(error)
        answer.finish = "failed"
        answer.error = sentence(error)
    finally:
        answer.finish = answer.finish or "failed"


async def _request(
    connection: Connection,
    conversation: Conversation,
    answer: Message,
    on_text: Callable[[Channel, str], None],
    parameters: dict[str, Any],
) -> None:
    client = await connection.client()
    if connection.running(answer.model) is None:
        await connection.use(answer.model)
    messages = conversation.request(answer)
    async with aclosing(client.chat(answer.model, messages, **parameters)) as events:
        async for event in events:
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
    advice = [text for kind, text in _ADVICE.items() if isinstance(error, kind)]
    lines = [message, error.hint, *advice]
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
