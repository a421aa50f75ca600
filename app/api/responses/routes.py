"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from ..answers import Answer, Head
from ..conversion import Converted, TokenCounter
from ..exchange import Asked, Protocol
from ..models import Models
from ..stream import Stream
from . import replies
from .answer import Options, ResponseAnswer
from .body import InputBody, ResponsesBody
from .items import Raw
from .stored import ResponseStore, StoredResponse

MAX_PAGE = 100  # items
Endpoint = Callable[[Request], Awaitable[Response]]


class ResponseRoutes:
    """The handlers of the routes below /v1/responses, and the protocol of POST /v1/responses."""

    def __init__(self, models: Models, limit: int, store: ResponseStore) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self._models = models
        self._limit = limit
        self._store = store
        # An answer is here as long as its exchange runs.
        self._running: WeakValueDictionary[str, ResponseAnswer] = WeakValueDictionary()
        self.protocol = Protocol(ResponsesBody, self._ask, blocks=True)

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        input_tokens = TokenCounter(self._models, self._limit, InputBody, self._converted, replies.InputTokens).__call__
        return [
            ("POST", "/responses/input_tokens", input_tokens),
            ("GET", "/responses/{id}", self.response),
            ("DELETE", "/responses/{id}", self.delete),
            ("POST", "/responses/{id}/cancel", self.cancel),
            ("GET", "/responses/{id}/input_items", self.input_items),
        ]

    async def response(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedParameter("stream: a response is streamed only while it is created", param="stream")
        identifier = request.path_params["id"]
        running = self._running_answer(identifier)
        return _raw(running.snapshot() if running else (await _of(self._store.get(identifier))).reply)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""
        identifier = request.path_params["id"]
        await _of(self._store.delete(identifier))
        return _json(replies.Deleted(identifier))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel: ends an answer that is streamed to another request."""
        identifier = request.path_params["id"]
        running = self._running_answer(identifier)
        if running:
            return _raw(running.cancel())
        stored = await _of(self._store.get(identifier))
        if msgspec.json.decode(stored.reply)["status"] != "cancelled":
            raise InvalidRequest(f"response {identifier!r} has ended", param="id")
        return _raw(stored.reply)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: without the items of the previous response."""
        query = request.query_params
        limit = _page_size(query.get("limit", "20"))
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        stored = await _of(self._store.get(request.path_params["id"]))
        items: list[Raw] = msgspec.json.decode(stored.input)
        if order == "desc":
            items.reverse()
        start = _start(items, query.get("after"))
        page = items[start : start + limit]
        ends = [item["id"] for item in page[:1] + page[-1:]] or [None]
        has_more = start + limit < len(items)
        return _json(replies.ItemList(data=page, first_id=ends[0], last_id=ends[-1], has_more=has_more))

    def _converted(self, body: InputBody) -> Converted:
        return body.resolved(self._store).converted(self._store)

    def _running_answer(self, identifier: str) -> ResponseAnswer | None:
        answer = self._running.get(identifier)
        return None if answer is None or answer.has_ended else answer

    def _ask(self, body: ResponsesBody) -> Asked:
        """A request for a response in the terms of the daemon. Reads stored responses."""
        identifier = f"resp_{uuid.uuid4().hex}"
        body = body.resolved(self._store)
        converted = body.converted(self._store)

        items = msgspec.json.encode(_listed(identifier, body.own_items()))

        def keep(reply: bytes) -> Future[None]:
            return self._store.put(StoredResponse(identifier, body.previous_response_id, reply, items))

        def answer(head: Head, stream: Stream) -> Answer:
            made = ResponseAnswer(head, Options(body, keep), stream.fail)
            self._running[identifier] = made
            return made

        return Asked(
            identifier,
            body,
            [converted.frame(identifier)],
            bool(body.stream),
            answer,
            converted.naming.explain,
            body.ignored_by_template,
        )


def _listed(identifier: str, items: list[Raw]) -> list[Raw]:
    """Input items with an id, a type, and a list of parts as content of a message."""
    listed: list[Raw] = []
    for index, raw in enumerate(items):
        item: Raw = {"id": f"item_{identifier.removeprefix('resp_')}_{index}", "type": "message"} | raw
        if item["type"] == "message" and isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        listed.append(item)
    return listed


def _page_size(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be 1 to {MAX_PAGE}", param="limit")
    return int(text)


def _start(items: list[Raw], after: str | None) -> int:
    """The place behind the item with the id `after`."""
    if after is None:
        return 0
    ids = [item["id"] for item in items]
    if after not in ids:
        raise ResponseNotFound(f"after: the response has no item {after[:100]!r}", param="after")
    return ids.index(after) + 1


async def _of(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


def _json(value: object) -> Response:
    return _raw(msgspec.json.encode(value))


def _raw(body: bytes) -> Response:
    return Response(body, media_type="application/json")
