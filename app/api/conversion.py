"""Requests of other protocols as chats, and the names of their parameters in errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import AppError, UnsupportedParameter
from ..frames import Generate, Tokenize, Tokens
from .body import is_local, read_converted
from .ignored import Policy, ignored_in
from .inputs import TargetBody
from .models import Models
from .openai import ChatBody

Target = TypeVar("Target", bound=TargetBody)
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


@dataclass(frozen=True, slots=True)
class TokenCounter(Generic[Target]):
    """Serves the routes that count the tokens of a prompt. `convert` may read files.

    `reply`: makes the reply from the number of tokens.
    """

    models: Models
    limit: int  # maximum size of a body in bytes
    body: type[Target]
    convert: Callable[[Target], Converted]
    reply: Callable[[int], msgspec.Struct]

    async def __call__(self, request: Request) -> Response:
        scope = request.scope
        policy = Policy(self.models.settings.strict_fields)

        def counting(body: Target) -> tuple[Converted, Tokenize]:
            if body.load is not None:
                raise UnsupportedParameter("load: only a request for an answer can load a model", param="load")
            converted = self.convert(body)
            policy.add(ignored_in(body))
            identifier = uuid.uuid4().hex
            return converted, Tokenize(id=identifier, request=converted.frame(identifier))

        body, (converted, frame) = await read_converted(
            scope, request.receive, self.body, self.limit, counting, blocks=True
        )
        try:
            async with await self.models.open(
                body.model, [frame], local=is_local(scope), lifetime=body.lifetime
            ) as stream:
                (reply,) = await stream.take()
        except AppError as error:
            raise converted.naming.explain(error) from None
        assert isinstance(reply, Tokens)
        count = msgspec.json.encode(self.reply(len(reply.tokens)))
        return Response(count, headers=policy.headers, media_type="application/json")
