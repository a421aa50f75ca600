"""One request for text, from its body to its last byte: whole or streamed, given up when the client hangs up."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..errors import AppError, Stopping
from .answers import KEEP_ALIVE, Answer, ChatAnswer, CompletionAnswer, Head, error_event
from .body import ClientGone, read_json
from .frames import Finished, Generate, ModelInfo, Piece
from .guards import is_local
from .host import Host
from .metrics import Metrics, Watch
from .openai import ChatBody, CompletionBody, check_tokens
from .replies import CachedTokens, UsageReport
from .stream import Stream

KEEP_ALIVE_SECONDS = 10.0
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that would collect the stream
]


class Exchange:
    """The endpoint of chats (`body=ChatBody`) or of completions (`body=CompletionBody`), an ASGI app."""

    def __init__(self, host: Host, metrics: Metrics, body: type[ChatBody] | type[CompletionBody], version: str) -> None:
        self.host, self.metrics, self.body, self.version = host, metrics, body, version
        self.limit = host.settings.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self.body, self.limit)
        await unless_gone(receive, self._answer(body, scope, receive, send))

    async def _answer(self, body: ChatBody | CompletionBody, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{uuid.uuid4().hex}"
        requests = body.frames(request_id)
        worker = await self.host.worker(body.model or self.host.only(), local=is_local(scope))
        assert worker.info is not None
        check_tokens(requests, worker.info.vocab)
        head = Head(request_id, worker.model, _fingerprint(self.version, worker.info))
        kind = ChatAnswer if isinstance(body, ChatBody) else CompletionAnswer
        choices = len(requests) * requests[0].n
        answer = kind(head, choices, logprobs=body.shows_logprobs, usage=body.wants_usage)
        watch = self.metrics.watch(worker.model)
        outcome = "cancelled"
        try:
            async with self.host.open(worker, requests, weight=choices) as stream:
                await stream.started()
                tally = _Tally(requests, stream, watch)
                if body.stream:
                    outcome = await _stream(answer, tally, send)
                else:
                    whole = await _collect(answer, tally)
                    await Response(whole, media_type="application/json")(scope, receive, send)
                    outcome = "ok"
        except AppError as error:
            outcome = error.code
            raise
        finally:
            self.metrics.requests.labels(worker.model, outcome).inc()


class _Tally:
    """Reads a stream as (number of the choice, piece), and adds up what it cost."""

    def __init__(self, requests: list[Generate], stream: Stream, watch: Watch) -> None:
        self.usage = UsageReport()
        self._stream, self._watch = stream, watch
        self._first_choice = {request.id: index * request.n for index, request in enumerate(requests)}

    async def take(self) -> list[tuple[int, Piece]]:
        """What is new; empty at the end. Raises what ended it."""
        while replies := await self._stream.take():
            pieces = [reply for reply in replies if isinstance(reply, Piece)]
            self._watch.pieces(pieces)
            for reply in replies:
                if isinstance(reply, Finished):
                    self._add(reply)
            if pieces:
                return [(self._first_choice[piece.id] + piece.choice, piece) for piece in pieces]
        return []

    def _add(self, end: Finished) -> None:
        if end.cancelled:  # not by us: we would not be reading any more
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
    return answer.whole(tally.usage)


def _fingerprint(version: str, info: ModelInfo) -> str:
    """What computes the answers: an earlier call may have loaded the model with another backend or quant."""
    return "-".join(filter(None, ("localllm", version, info.backend, info.dtype, info.quant)))


async def _stream(answer: Answer, tally: _Tally, send: Send) -> str:
    """Server-sent events to the end. Errors become an event, as the status is sent already; returns the outcome."""

    async def write(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
    await write(answer.opening())
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                pieces = await tally.take()
            data = b"".join(answer.part(choice, piece) for choice, piece in pieces)
            if not pieces:
                await write(answer.closing(tally.usage), more=False)
                return "ok"
        except TimeoutError:
            data = KEEP_ALIVE
        except AppError as error:
            await write(error_event(error), more=False)
            return error.code
        if data:
            await write(data)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; cancel it and raise ClientGone as soon as the client hangs up. The body must have been read."""

    async def gone() -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await receive()

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
