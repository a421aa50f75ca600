"""Serves a request for an answer with one JSON document or a stream; cancels it if the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import AppError, Stopping
from ..frames import AskStats, Finished, Generate, ModelInfo, Piece
from . import keep_alive
from .answers import SERVER_SENT, Answer, Best, ChatAnswer, CompletionAnswer, Framing, Head
from .body import Body, ClientGone, is_local, read_converted
from .ignored import Policy, ignored_in
from .inputs import TargetBody
from .metrics import Metrics, Watch
from .models import Models, Request
from .openai import ChatBody, CompletionBody
from .replies import CachedTokens, UsageReport
from .stream import Stream

Result = TypeVar("Result")
log = logging.getLogger(__name__)


def stream_headers(framing: Framing, more: Mapping[str, str] = MappingProxyType({})) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", framing.media),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # tells proxies not to buffer the stream
        *((name.encode(), value.encode()) for name, value in more.items()),
    ]


SSE_HEADERS = stream_headers(SERVER_SENT)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for answers in the terms of the daemon. Every protocol converts its bodies to it. Without requests, the
    model is only loaded, and the answer has no pieces.

    `answer`: makes the writer of the reply when the worker has accepted the request. `explain`: converts an error of
    the worker to one that names the parameters of the protocol. `fields`: the fields of the protocol for names of
    Started.ignored.
    """

    id: str
    body: TargetBody
    requests: list[Generate]
    is_streamed: bool
    answer: Callable[[Head, Stream], Answer]
    explain: Callable[[AppError], AppError] = lambda error: error
    fields: Callable[[Sequence[str]], Sequence[str]] = lambda names: names


@dataclass(frozen=True, slots=True)
class Protocol(Generic[Body]):
    """The type of the bodies of a route, and their conversion. `blocks`: the conversion reads files."""

    body: type[Body]
    ask: Callable[[Body], Asked]
    blocks: bool = False


def _ask_chat(body: ChatBody) -> Asked:
    def answer(head: Head, stream: Stream) -> Answer:
        return ChatAnswer(head, stream.weight, logprobs=body.shows_logprobs, usage=body.wants_usage)

    identifier = f"chatcmpl-{uuid.uuid4().hex}"
    frames = body.frames(identifier)
    return Asked(identifier, body, frames, bool(body.stream), answer, fields=body.ignored_by_template)


def _ask_completion(body: CompletionBody) -> Asked:
    def answer(head: Head, stream: Stream) -> Answer:
        best = Best(body.best_of, body.kept) if body.best_of and body.kept else None
        return CompletionAnswer(head, stream.weight, logprobs=body.shows_logprobs, usage=body.wants_usage, best=best)

    identifier = f"cmpl-{uuid.uuid4().hex}"
    return Asked(identifier, body, body.frames(identifier), bool(body.stream), answer)


CHAT = Protocol(ChatBody, _ask_chat)
COMPLETION = Protocol(CompletionBody, _ask_completion)


class Exchange:
    """The ASGI app of one route that answers with text."""

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        protocol: Protocol[Any],
        version: str,
        check_admin: Callable[[Scope], None],
    ) -> None:
        """`check_admin` raises Forbidden if the client may not choose how a model is loaded."""
        self.models = models
        self.metrics = metrics
        self.protocol = protocol
        self.version = version
        self.check_admin = check_admin
        self.limit = models.settings.developer.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        protocol = self.protocol
        policy = Policy(self.models.settings.strict_fields)

        def convert(body: Any) -> Asked:
            asked = protocol.ask(body)
            policy.add(ignored_in(body))
            return asked

        _, asked = await read_converted(scope, receive, protocol.body, self.limit, convert, blocks=protocol.blocks)
        if asked.body.load is not None:
            self.check_admin(scope)
        await unless_gone(receive, self._answer(asked, policy, scope, receive, send))

    async def _answer(self, asked: Asked, policy: Policy, scope: Scope, receive: Receive, send: Send) -> None:
        frames: Sequence[Request] = asked.requests or [AskStats(id=asked.id)]
        choices = sum(request.n for request in asked.requests)
        try:
            stream = await open_stream(
                self.models, self.metrics, asked.body, frames, weight=choices, local=is_local(scope)
            )
        except AppError as error:
            raise asked.explain(error) from None
        model = stream.info.model
        name = f"{model}:{stream.adapter}" if stream.adapter else model
        tally = _Tally(asked.requests, stream, self.metrics.watch(model))
        outcome = "cancelled"
        try:
            async with stream:
                await stream.started()
                policy.add(asked.fields(stream.ignored))
                for warning in stream.warnings:
                    log.warning("%s: %s", model, warning)
                fingerprint = _fingerprint(self.version, stream.info)
                answer = asked.answer(Head(asked.id, name, fingerprint, stream.warnings, stream.prompt_tokens), stream)
                if asked.is_streamed:
                    outcome = await _stream(answer, tally, send, asked.explain, policy.headers)
                else:
                    document = await _collect(answer, tally)
                    await Response(document, headers=policy.headers, media_type="application/json")(
                        scope, receive, send
                    )
                    outcome = "ok"
        except AppError as error:
            outcome = error.code
            raise asked.explain(error) from None
        finally:
            self.metrics.requests.labels(model, outcome).inc()


async def open_stream(
    models: Models, metrics: Metrics, body: TargetBody, requests: Sequence[Request], *, weight: int, local: bool
) -> Stream:
    """Send the requests to the model that `body` selects. `weight` and `local`: see Models.open.

    The metrics count a refused request only if its model is loaded: any other name comes from the client and must not
    become a label.
    """
    name = body.model
    try:
        return await models.open(
            name, requests, weight=weight, local=local, flags=body.load_flags, lifetime=body.lifetime
        )
    except AppError as error:
        if name and models.find(name):
            metrics.requests.labels(name, error.code).inc()
        raise


class _Tally:
    """Reads the pieces of an answer from the stream of a worker, and counts tokens."""

    def __init__(self, requests: list[Generate], stream: Stream, watch: Watch) -> None:
        self.usage = UsageReport()
        self._stream = stream
        self._watch = watch
        self._first_choice = {request.id: index * request.n for index, request in enumerate(requests)}

    async def take(self) -> list[tuple[int, Piece]]:
        """New pieces as (index of the choice, piece); empty after the last piece. Raises the error of the stream."""
        while replies := await self._stream.take():
            pieces = [reply for reply in replies if isinstance(reply, Piece)]
            self._watch.pieces(pieces)
            for reply in replies:
                if isinstance(reply, Finished):
                    self._add(reply)
            if pieces:
                return [(self._first_choice[piece.id] + piece.choice, piece) for piece in pieces]
        return []

    def wake(self) -> None:
        """Let `take` raise TimeoutError if it waits."""
        self._stream.wake()

    def _add(self, end: Finished) -> None:
        if end.cancelled:  # the engine is closing: the daemon reads no replies of requests that it cancels itself
            raise Stopping("the engine cancelled the request")
        self._watch.tokens(end.prompt_tokens, end.completion_tokens)
        prompt = self.usage.prompt_tokens + end.prompt_tokens
        generated = self.usage.completion_tokens + end.completion_tokens
        cached = self.usage.prompt_tokens_details.cached_tokens + end.cached_tokens
        self.usage = UsageReport(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=CachedTokens(cached),
            decode_seconds=round(self._watch.decode_seconds, 6),
        )


async def _collect(answer: Answer, tally: _Tally) -> bytes:
    while pieces := await tally.take():
        for choice, piece in pieces:
            answer.take(choice, piece)
    return answer.document(tally.usage)


def _fingerprint(version: str, info: ModelInfo) -> str:
    """The field system_fingerprint: version, and backend, dtype and quant of the loaded model."""
    return "-".join(filter(None, ("localllm", version, info.backend, info.dtype, info.quant)))


async def _stream(
    answer: Answer,
    tally: _Tally,
    send: Send,
    explain: Callable[[AppError], AppError],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Send the answer as a stream; returns its outcome for the metrics.

    An error becomes a part of the stream, because the status of the response is already sent.
    """

    async def write(data: bytes, *, more: bool = True) -> None:
        deadline.restart()
        await send({"type": "http.response.body", "body": data, "more_body": more})

    deadline = keep_alive.Deadline()
    await send({"type": "http.response.start", "status": 200, "headers": stream_headers(answer.framing, headers)})
    await write(answer.opening())
    with deadline.watch(tally.wake):
        while True:
            data = b""
            try:
                pieces = await tally.take()
                data = b"".join([answer.part(choice, piece) for choice, piece in pieces])
                if not pieces:
                    await write(answer.closing(tally.usage), more=False)
                    return "ok"
            except TimeoutError:
                pass
            except AppError as error:
                await write(answer.failure(explain(error)), more=False)
                return error.code
            if not data and deadline.passed:  # pieces may arrive that have no data for the client
                data = answer.framing.idle
            if data:
                await write(data)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. If the client disconnects first, cancel `work` and raise ClientGone.

    Read the body of the request before the call: this function receives and drops all further messages of the client.
    """

    async def wait_for_disconnect() -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
