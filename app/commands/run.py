"""`localllm run`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager, aclosing
from typing import IO, Any

import click
import msgspec

from .. import config
from ..client import Client, Done, ReasoningPiece, TextPiece, ToolCall
from ..errors import InvalidRequest
from .asking import loaded, opening, parameters
from .console import say, write


def run(
    model: str, prompt: str | None, backend: str | None, quant: str | None, as_json: bool, asked: dict[str, Any]
) -> int:
    """Ask once; the answer goes to standard output as it comes, or as one JSON object at the end."""
    settings = config.load()
    messages = [*opening(asked.pop("system")), {"role": "user", "content": _prompt(prompt)}]
    shape = _format(asked.pop("schema"), asked.pop("regex"))
    body = parameters(asked) | shape
    asyncio.run(_run(loaded(settings, model, backend, quant), model, messages, body, as_json))
    return 0


async def _run(
    session: AbstractAsyncContextManager[Client],
    model: str,
    messages: list[dict[str, Any]],
    body: dict[str, Any],
    as_json: bool,
) -> None:
    async with session as client:
        if as_json:
            click.echo(json.dumps(await _collect(client, model, messages, body), ensure_ascii=False))
        else:
            await stream(client, model, messages, body)


async def stream(client: Client, model: str, messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
    """Print an answer as it comes, end its line, and give its text. Thoughts go to standard error."""
    text: list[str] = []
    async with aclosing(client.chat(model, messages, **body)) as events:  # closing it cancels the request
        async for event in events:
            match event:
                case TextPiece(piece):
                    text.append(piece)
                    write(piece)
                case ReasoningPiece(piece):
                    click.echo(piece, nl=False, err=True)
                case ToolCall():
                    write(f"{event.name}({event.arguments})")
                case Done():
                    write("\n")
                    if event.finish == "length":
                        say("the answer stops at its length limit (see --max-tokens)")
    return "".join(text)


async def _collect(client: Client, model: str, messages: list[dict[str, Any]], body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": model, "text": "", "reasoning": "", "tool_calls": []}
    async with aclosing(client.chat(model, messages, **body)) as events:
        async for event in events:
            match event:
                case TextPiece(piece):
                    answer["text"] += piece
                case ReasoningPiece(piece):
                    answer["reasoning"] += piece
                case ToolCall():
                    answer["tool_calls"].append(msgspec.structs.asdict(event))
                case Done():
                    answer["finish"] = event.finish
                    answer["usage"] = msgspec.structs.asdict(event.usage)
                    answer["timings"] = {
                        "ttft": event.ttft,
                        "seconds": event.seconds,
                        "tokens_per_second": event.tokens_per_second,
                    }
    return answer


def _prompt(prompt: str | None) -> str:
    """The argument and standard input, in this order, with an empty line between them."""
    piped = ""
    if prompt and _read_by_another():
        say("standard input, a file that was read in part before, is not part of the prompt")
    elif not sys.stdin.isatty():
        piped = text_of(sys.stdin.buffer.read(), "standard input").strip("\n")
    if prompt and piped:  # in a loop that reads a pipe line by line, it holds the other lines
        say(f"standard input ({len(piped)} characters) is part of the prompt; < /dev/null leaves it out")
    whole = "\n\n".join(part for part in (prompt, piped) if part)
    if not whole.strip():
        raise InvalidRequest("there is no prompt", hint='give one: localllm run guide "hello", or pipe it in')
    return whole


def _read_by_another() -> bool:
    """Whether standard input is a file that another program has read in part, such as the loop of a shell."""
    try:
        return sys.stdin.buffer.seekable() and sys.stdin.buffer.tell() > 0
    except OSError:
        return False


def _format(schema: IO[bytes] | None, regex: str | None) -> dict[str, Any]:
    """--schema and --regex in the words of an OpenAI body."""
    if schema and regex:
        raise InvalidRequest("--schema and --regex cannot be used together")
    if regex:
        return {"regex": regex}
    if not schema:
        return {}
    try:
        value = json.loads(text_of(schema.read(), schema.name))
    except ValueError as error:
        raise InvalidRequest(f"{schema.name} is not JSON: {error}") from None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}


def text_of(data: bytes, where: str) -> str:
    """UTF-8 text. Raises InvalidRequest rather than guessing at other bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 text (byte {error.start})") from None
