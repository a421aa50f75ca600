"""Requests one answer and fills a message with it. Independent of widgets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from typing import Literal

from ...client import Done, ReasoningPiece, TextPiece, ToolCall
from ...errors import AppError, ContextTooLong
from ..connection import Connection
from ..conversation import Conversation, Message
from ..text import clean, visible

Part = Literal["text", "reasoning"]


async def run(
    connection: Connection, conversation: Conversation, answer: Message, on_piece: Callable[[Part, str], None]
) -> None:
    """Request `answer` and fill it. `on_piece` gets each addition. Always sets `finish`.

    An error of the daemon sets `finish="failed"` and `error`, and keeps the text so far. Cancelling the task cancels
    the request, sets `finish="stopped"` and raises CancelledError.
    """
    try:
        client = await connection.client()
        if connection.running(answer.model) is None:
            await connection.use(answer.model)
        parameters = conversation.parameters
        async with aclosing(client.chat(answer.model, conversation.request(answer), **parameters)) as events:
            async for event in events:
                match event:
                    case TextPiece(text):
                        answer.content += (text := clean(text))
                        on_piece("text", text)
                    case ReasoningPiece(text):
                        answer.reasoning += (text := clean(text))
                        on_piece("reasoning", text)
                    case ToolCall():
                        answer.content += (text := _shown(event))
                        on_piece("text", text)
                    case Done():
                        _settle(answer, event)
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


def sentence(error: AppError) -> str:
    """An error as text for the user: message, numbers, hint."""
    numbers = {name.replace("_", " "): str(value) for name, value in error.numbers.items()}
    missing = [f"{name} {value}" for name, value in numbers.items() if value not in error.message]
    parts = [error.message + (f" ({', '.join(missing)})" if missing else ""), error.hint]
    if isinstance(error, ContextTooLong):
        parts.append("Try /new, a shorter message (/edit), or a model with a larger context (/model)")
    lines = [part.rstrip(".") + "." for part in parts if part]
    return visible("\n".join([lines[0][0].upper() + lines[0][1:], *lines[1:]]))


def _settle(answer: Message, done: Done) -> None:
    answer.finish = "length" if done.finish == "length" else "tool_calls" if done.finish == "tool_calls" else "stop"
    answer.prompt_tokens = done.usage.prompt_tokens
    answer.completion_tokens = done.usage.completion_tokens
    answer.cached_tokens = done.usage.cached_tokens
    answer.ttft = done.ttft
    answer.seconds = done.seconds


def _shown(call: ToolCall) -> str:
    """A tool call as text: this UI has no tools, so it shows the call."""
    return clean(f"\n```json\n{json.dumps({'name': call.name, 'arguments': call.arguments}, indent=2)}\n```\n")
