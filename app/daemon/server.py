"""The routes of the daemon, as an ASGI app."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import frames
from ..config import loading
from ..errors import AppError, Forbidden, InvalidRequest, MethodNotAllowed, ModelNotFound, RouteNotFound
from ..store import catalog
from ..version import VERSION
from .admin import LoadBody, LoadProgress, ModelEntry, Status, UnloadBody
from .answers import error_event, event
from .body import read_json
from .exchange import SSE_HEADERS, Exchange, unless_gone
from .guards import Errors, Heads, Hosts, Keys, Origins, Paths, Traced, error_response, is_local
from .host import Host
from .messages import message_dict
from .metrics import CONTENT_TYPE, Metrics
from .openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .openapi import describe

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Door:
    """How clients reach the daemon: its URL, and the key that TCP clients must send (empty: none)."""

    url: str = ""
    key: str = ""
    names: tuple[str, ...] = ()  # more names for the Host header
    stop: Callable[[], None] = field(default=lambda: None)


def build(host: Host, door: Door) -> ASGIApp:
    """The daemon as an ASGI app."""
    api = _Api(host, door)
    settings = host.settings
    return Starlette(
        routes=api.routes(),
        middleware=[
            Middleware(Traced),
            Middleware(Errors),
            Middleware(Heads),
            Middleware(Paths),
            Middleware(Hosts, allowed=(*settings.allowed_hosts, *door.names)),
            Middleware(Origins, allowed=settings.allowed_origins),
            Middleware(Keys, key=door.key),
        ],
        exception_handlers={HTTPException: _no_route},
    )


class _Api:
    def __init__(self, host: Host, door: Door) -> None:
        self.host = host
        self.door = door
        self.metrics = Metrics()
        self.limit = host.settings.max_body_mib * 2**20

    def routes(self) -> list[Route]:
        chat = Exchange(self.host, self.metrics, ChatBody, VERSION)
        completion = Exchange(self.host, self.metrics, CompletionBody, VERSION)
        openai_routes: list[tuple[str, str, Any]] = [
            ("POST", "/chat/completions", chat),
            ("POST", "/completions", completion),
            ("GET", "/models", self.models),
            ("GET", "/models/{id:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ]
        daemon_routes: list[tuple[str, str, Any]] = [
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.figures),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/admin/status", self.for_us(self.status)),
            ("GET", "/admin/models", self.for_us(self.available)),
            ("GET", "/admin/loaded", self.for_us(self.loaded)),
            ("POST", "/admin/load", _Load(self.host, self.door)),
            ("POST", "/admin/unload", self.for_us(self.unload)),
            ("POST", "/admin/shutdown", self.for_us(self.shutdown)),
        ]
        routes = daemon_routes + openai_routes
        routes += [(method, f"/v1{path}", endpoint) for method, path, endpoint in openai_routes]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in routes]

    def for_us(self, endpoint: Endpoint) -> Endpoint:
        """The endpoint for requests over the unix socket or with the API key; Forbidden for others."""

        async def guarded(request: Request) -> Response:
            check_admin(request.scope, self.door)
            return await endpoint(request)

        return guarded

    async def health(self, request: Request) -> Response:
        return _json({"status": "stopping" if self.host.stopping else "ok", "version": VERSION})

    async def figures(self, request: Request) -> Response:
        stats = {worker.model: stats for worker, stats in await self.host.stats() if stats is not None}
        return Response(self.metrics.render(stats, self.host.deaths), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return _json(describe(VERSION))

    async def models(self, request: Request) -> Response:
        known = await asyncio.to_thread(catalog.available)
        return _json({"object": "list", "data": [self._card(model) for model in known]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if catalog.is_path(name):
            raise ModelNotFound(f"model {name!r} is not on this machine", param="model")
        return _json(self._card(await asyncio.to_thread(catalog.resolve, name)))

    def _card(self, model: catalog.ModelRef) -> dict[str, Any]:
        worker = self.host.find(model.id)
        context = worker.info.context if worker and worker.info else model.context
        return {
            "id": model.id,
            "object": "model",
            "created": int((model.path / "config.json").stat().st_mtime),
            "owned_by": "localllm",
            "loaded": worker is not None,
            "max_model_len": context or None,
        }

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request.scope, request.receive, TokenizeBody, self.limit)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
        frame = frames.Tokenize(
            id=uuid.uuid4().hex,
            prompt=body.prompt,
            messages=None if body.messages is None else [message_dict(message) for message in body.messages],
            add_special_tokens=body.add_special_tokens is not False,
        )
        reply, info = await self._ask(request, body.model, frame)
        assert isinstance(reply, frames.Tokens)
        return _json(
            {
                "count": len(reply.tokens),
                "max_model_len": info.context,
                "tokens": reply.tokens,
                "token_strs": reply.pieces,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request.scope, request.receive, DetokenizeBody, self.limit)
        frame = frames.Detokenize(id=uuid.uuid4().hex, tokens=body.tokens)
        reply, _ = await self._ask(request, body.model, frame)
        assert isinstance(reply, frames.Text)
        return _json({"prompt": reply.text})

    async def _ask(
        self, request: Request, model: str | None, frame: frames.Tokenize | frames.Detokenize
    ) -> tuple[object, frames.ModelInfo]:
        """Send one frame to the worker of a model; its reply, and the info of the model."""
        worker = await self.host.worker(model or self.host.only(), local=is_local(request.scope))
        assert worker.info is not None
        if isinstance(frame, frames.Detokenize) and frame.tokens and max(frame.tokens) >= worker.info.vocab:
            raise InvalidRequest(
                f"tokens: token id {max(frame.tokens)} is not in the model's vocabulary of {worker.info.vocab}",
                param="tokens",
            )
        async with self.host.open(worker, [frame]) as stream:
            replies = await stream.take()
        return replies[0], worker.info

    async def status(self, request: Request) -> Response:
        settings = loading(self.host.settings)
        return _json(
            Status(version=VERSION, pid=os.getpid(), url=self.door.url, stopping=self.host.stopping, settings=settings)
        )

    async def available(self, request: Request) -> Response:
        known = await asyncio.to_thread(catalog.available)
        return _json(
            [
                ModelEntry(
                    id=model.id,
                    bundled=model.bundled,
                    loaded=self.host.find(model.id) is not None,
                    size=model.size,
                    context=model.context,
                    description=model.description,
                )
                for model in known
            ]
        )

    async def loaded(self, request: Request) -> Response:
        return _json(await self.host.loaded())

    async def unload(self, request: Request) -> Response:
        body = await read_json(request.scope, request.receive, UnloadBody, self.limit)
        await self.host.unload(body.model)
        return _json({})

    async def shutdown(self, request: Request) -> Response:
        self.door.stop()
        return _json({}, status=202)


class _Load:
    """POST /admin/load. Replies with events: the progress of the load, then the model or an error."""

    def __init__(self, host: Host, door: Door) -> None:
        self.host = host
        self.door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope, self.door)
        body = await read_json(scope, receive, LoadBody, 2**20)
        await unless_gone(receive, self._answer(body, is_local(scope), send))

    async def _answer(self, body: LoadBody, local: bool, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        async for data in self._events(body, local):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, body: LoadBody, local: bool) -> AsyncIterator[bytes]:
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        load = asyncio.create_task(
            self.host.worker(
                body.model,
                local=local,
                backend=body.backend,
                quant=body.quant,
                progress=lambda stage, done: events.put_nowait(event(LoadProgress(stage, done))),
            )
        )
        load.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while data := await events.get():
                yield data
            worker = load.result()
            models = {model.id: model for model in await self.host.loaded()}
            yield event(models[worker.model])
        except AppError as error:
            yield error_event(error)
        finally:
            load.cancel()


def check_admin(scope: Scope, door: Door) -> None:
    """Raises Forbidden if a request came over TCP and the daemon has no API key. `Keys` has checked the key."""
    if not is_local(scope) and not door.key:
        raise Forbidden("this route needs the unix socket or an API key")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        return error_response(MethodNotAllowed(f"{where}: method not allowed"), dict(error.headers or {}))
    return error_response(RouteNotFound(f"{where}: unknown route", hint="GET /openapi.json lists the routes"))
