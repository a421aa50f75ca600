"""One answer from asking to its end, told to the message it fills. Knows no widget."""

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
    """Ask for `answer` and fill it; `on_piece` gets each addition. The message's `finish` is set in every case.

    Errors of the daemon end in `finish="failed"` with a sentence in `error`; the text so far stays. Cancelling the
    task cancels the request, sets `finish="stopped"` and goes on as CancelledError.
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
            answer.finish, answer.error = "failed", "The answer broke off without an end."
    except asyncio.CancelledError:
        answer.finish = answer.finish or "stopped"
        raise
    except AppError as error:
        connection.lost(error)
        answer.finish, answer.error = "failed", sentence(error)
    finally:
        answer.finish = answer.finish or "failed"


def sentence(error: AppError) -> str:
    """The error for people: what happened, its numbers, what helps."""
    numbers = {name.replace("_", " "): str(value) for name, value in error.numbers.items()}
    missing = [f"{name} {value}" for name, value in numbers.items() if value not in error.message]
    parts = [error.message + (f" ({', '.join(missing)})" if missing else ""), error.hint]
    if isinstance(error, ContextTooLong):
        parts.append("What helps: /new, a shorter message (/edit), or a model with a larger context (/model)")
    lines = [part.rstrip(".") + "." for part in parts if part]
    return visible("\n".join([lines[0][0].upper() + lines[0][1:], *lines[1:]]))


def _settle(answer: Message, done: Done) -> None:
    answer.finish = "length" if done.finish == "length" else "tool_calls" if done.finish == "tool_calls" else "stop"
    answer.prompt_tokens = done.usage.prompt_tokens
    answer.completion_tokens = done.usage.completion_tokens
    answer.cached_tokens = done.usage.cached_tokens
    answer.ttft, answer.seconds = done.ttft, done.seconds


def _shown(call: ToolCall) -> str:
    """A tool call as text; this UI offers no tools, so a model that calls one is quoted."""
    return clean(f"\n```json\n{json.dumps({'name': call.name, 'arguments': call.arguments}, indent=2)}\n```\n")
