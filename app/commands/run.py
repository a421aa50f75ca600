"""`localllm run`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import codecs
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import IO, Any

import click
import msgspec

from .. import config
from ..client import ChatEvent, Client, Done, LoadedModel, LoadFlags, ReasoningPiece, TextPiece, ToolCall
from ..errors import InvalidRequest
from .console import safe, say, write
from .session import loaded_client, parameters, system_messages, typed

COMPLETION_TOKENS = 256  # of a base model, which seldom ends a text by itself


def run(model: str, prompt: str | None, load: Mapping[str, Any], as_json: bool, flags: dict[str, Any]) -> int:
    """Answer one prompt: stream the answer to standard output, or print one JSON object at the end.

    `load`: the flags of the load by their names in LoadFlags.
    """
    settings = config.load()
    system = flags.pop("system")
    text = _prompt(prompt)
    constraint = _constraint(flags.pop("schema"), flags.pop("regex"))
    body = parameters(flags) | constraint
    asyncio.run(_run(loaded_client(settings, model, LoadFlags(**load)), model, (system, text), body, as_json))
    return 0


async def _run(
    session: AbstractAsyncContextManager[Client],
    model: str,
    prompt: tuple[str | None, str],
    body: dict[str, Any],
    as_json: bool,
) -> None:
    """`prompt`: the system message, and the text of the user."""
    async with session as client:
        info = await client.load(model)  # returns the properties of the loaded model
        events = _complete(client, info, prompt, body) if info.purpose == "base" else _chat(client, model, prompt, body)
        if as_json:
            click.echo(json.dumps(await _collect(model, events), ensure_ascii=False))
        else:
            await stream(events)


def _chat(
    client: Client, model: str, prompt: tuple[str | None, str], body: dict[str, Any]
) -> AsyncGenerator[ChatEvent]:
    system, text = prompt
    return client.chat(model, [*system_messages(system), {"role": "user", "content": text}], **body)


def _complete(
    client: Client, info: LoadedModel, prompt: tuple[str | None, str], body: dict[str, Any]
) -> AsyncGenerator[ChatEvent]:
    """The completion of a text by a base model. Raises InvalidRequest for a system message."""
    system, text = prompt
    if system:
        message = f"{info.id} is a base model without a chat template: it has no system message"
        raise InvalidRequest(message, hint="omit --system, and begin the text that the model completes")
    say(f"{info.id} is a base model: it completes the text")
    return client.complete(info.id, text, **{"max_tokens": COMPLETION_TOKENS} | body)


async def stream(answer: AsyncGenerator[ChatEvent]) -> str:
    """Stream an answer to standard output and return its text.

    Reasoning is printed to standard error. On a terminal, which shows both, an empty line is between them.
    """
    text: list[str] = []
    reasoning = ""
    async with aclosing(answer) as events:  # closing the events cancels the request
        async for event in events:
            if reasoning and not isinstance(event, ReasoningPiece):
                click.echo("\n" * max(2 - _final_newlines(reasoning), 0), nl=False, err=True)
                reasoning = ""
            match event:
                case TextPiece(piece):
                    text.append(piece)
                    write(piece)
                case ReasoningPiece(piece):
                    reasoning = (reasoning + piece)[-2:]
                    click.echo(safe(piece), nl=False, err=True)
                case ToolCall():
                    write(f"{event.name}({event.arguments})")
                case Done():
                    write("\n")
                    if event.finish == "length":
                        say("the answer reached its length limit (see --max-tokens)")
    return "".join(text)


def _final_newlines(text: str) -> int:
    return len(text) - len(text.rstrip("\n"))


async def _collect(model: str, events: AsyncGenerator[ChatEvent]) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": model, "text": "", "reasoning": "", "tool_calls": []}
    async with aclosing(events):
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
        piped = text_of(sys.stdin.buffer.read(), "standard input").strip("\r\n")
    if prompt and piped:  # in a shell loop over a pipe, standard input is the rest of the loop's lines
        say(f"the prompt includes standard input ({len(piped)} characters); add < /dev/null to exclude it")
    text = "\n\n".join(filter(None, (prompt and typed(prompt), piped)))
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
    """Decode UTF-8, without a byte order mark. Raises InvalidRequest for other bytes."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequest(f"{where} is not UTF-8 text, but UTF-16", hint="save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 text (byte {error.start})") from None
