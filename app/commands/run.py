"""`localllm run`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import IO, Any

import click
import msgspec

from .. import config
from ..client import Client, Done, LoadFlags, ReasoningPiece, TextPiece, ToolCall
from ..errors import InvalidRequest
from .console import safe, say, write
from .session import loaded_client, parameters, system_messages


def run(model: str, prompt: str | None, load: Mapping[str, Any], as_json: bool, flags: dict[str, Any]) -> int:
    """Answer one prompt: stream the answer to standard output, or print one JSON object at the end.

    `load`: the flags of the load by their names in LoadFlags.
    """
    settings = config.load()
    messages = [*system_messages(flags.pop("system")), {"role": "user", "content": _prompt(prompt)}]
    constraint = _constraint(flags.pop("schema"), flags.pop("regex"))
    body = parameters(flags) | constraint
    asyncio.run(_run(loaded_client(settings, model, LoadFlags(**load)), model, messages, body, as_json))
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
    """Stream an answer to standard output and return its text. Reasoning is printed to standard error."""
    text: list[str] = []
    async with aclosing(client.chat(model, messages, **body)) as events:  # closing the events cancels the request
        async for event in events:
            match event:
                case TextPiece(piece):
                    text.append(piece)
                    write(piece)
                case ReasoningPiece(piece):
                    click.echo(safe(piece), nl=False, err=True)
                case ToolCall():
                    write(f"{event.name}({event.arguments})")
                case Done():
                    write("\n")
                    if event.finish == "length":
                        say("the answer reached its length limit (see --max-tokens)")
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
    """The prompt: the argument, an empty line, and standard input."""
    piped = ""
    if prompt and _is_partly_read():
        say("standard input is ignored: another program has already read part of that file")
    elif not sys.stdin.isatty():
        piped = text_of(sys.stdin.buffer.read(), "standard input").strip("\n")
    if prompt and piped:  # in a shell loop over a pipe, standard input is the rest of the loop's lines
        say(f"the prompt includes standard input ({len(piped)} characters); add < /dev/null to exclude it")
    text = "\n\n".join(filter(None, (prompt, piped)))
    if not text.strip():
        raise InvalidRequest("no prompt", hint='for example: localllm run guide "hello", or pipe the prompt in')
    return text


def _is_partly_read() -> bool:
    """True if standard input is a file that another program, such as a shell loop, has partly read."""
    try:
        return sys.stdin.buffer.seekable() and sys.stdin.buffer.tell() > 0
    except OSError:
        return False


def _constraint(schema: IO[bytes] | None, regex: str | None) -> dict[str, Any]:
    """--schema or --regex as OpenAI parameters."""
    if schema and regex:
        raise InvalidRequest("only one of --schema and --regex may be given")
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
    """Decode UTF-8. Raises InvalidRequest for other bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 text (byte {error.start})") from None
