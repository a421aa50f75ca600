"""Requests of other protocols as chats, and the names of their parameters in errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope

from ..errors import AppError
from ..frames import Generate, Tokenize, Tokens
from .body import Body, is_local, read_converted
from .models import Models
from .openai import ChatBody

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Naming:
    """`patterns`: the start of a parameter of the chat, and its replacement. `places`: the path of each message."""

    patterns: Sequence[tuple[re.Pattern[str], str]]
    places: Sequence[str] = ()

    def explain(self, error: AppError) -> AppError:
        """The error with the names that the client knows."""
        if error.param is None:
            return error
        param = self._name(error.param)
        message = error.message.replace(error.param, param, 1)
        return type(error)(message, hint=error.hint, param=param, **error.numbers)

    def _name(self, param: str) -> str:
        message = _MESSAGE.match(param)
        if message:
            param = self.places[int(message[1])] + param[message.end() :]
        for pattern, replacement in self.patterns:
            param, count = pattern.subn(replacement, param)
            if count:
                break
        return param


@dataclass(frozen=True, slots=True)
class Converted:
    """A body as a chat, and the names of its fields in the body."""

    chat: ChatBody
    naming: Naming

    def frame(self, identifier: str) -> Generate:
        """The frame for a worker. Raises InvalidRequest that names a field of the body."""
        try:
            (frame,) = self.chat.frames(identifier)
        except AppError as error:
            raise self.naming.explain(error) from None
        return frame


async def count_tokens(
    models: Models,
    scope: Scope,
    receive: Receive,
    kind: type[Body],
    limit: int,
    convert: Callable[[Body], Converted],
    *,
    blocks: bool = False,
) -> int:
    """The number of tokens of the prompt of a request. Raises an AppError that names the invalid field."""

    def counting(body: Body) -> tuple[Converted, Tokenize]:
        converted = convert(body)
        identifier = uuid.uuid4().hex
        return converted, Tokenize(id=identifier, request=converted.frame(identifier))

    _, (converted, frame) = await read_converted(scope, receive, kind, limit, counting, blocks=blocks)
    try:
        async with await models.open(converted.chat.model, [frame], local=is_local(scope)) as stream:
            (reply,) = await stream.take()
    except AppError as error:
        raise converted.naming.explain(error) from None
    assert isinstance(reply, Tokens)
    return len(reply.tokens)
