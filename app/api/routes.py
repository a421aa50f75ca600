"""The routes of the API, and their handlers."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from ...engine.errors import ModelRefused
from ...engine.files.model_files import MODULES, read_architecture
from ...engine.files.pooling import read_pooling
from .. import frames, paths
from ..config import loading
from ..errors import Forbidden, MethodNotAllowed, ModelNotFound, RouteNotFound
from ..store import listing, resolved
from ..store.local.refs import ModelRef
from ..store.names import is_path
from ..store.pull.jobs import Jobs
from ..store.records import ListedModel
from ..version import VERSION
from .adapters import AdapterRoutes
from .admin import AdapterEntry, LoadBody, LoadedModel, LoadProgress, ModelEntry, Status, UnloadBody
from .anthropic.body import MESSAGES, CountBody
from .anthropic.replies import TokenCount
from .body import is_local, read_converted, read_json
from .conversion import TokenCounter
from .embeddings import Embeddings
from .events import EventStream, Report
from .exchange import CHAT, COMPLETION, Exchange, unless_gone
from .llama_server import INFILL, LlamaServer
from .metrics import CONTENT_TYPE, Metrics
from .models import Models
from .ollama import answer as ollama
from .ollama.library import Library
from .ollama.vectors import EmbedBody, EmbeddingsBody
from .openai import DetokenizeBody, TokenizeBody
from .openapi import describe
from .replies import error_response
from .rerank import RerankBody, Reranking, ScoreBody
from .responses.routes import ResponseRoutes
from .responses.stored import ResponseStore
from .store import StoreRoutes
from .store_commands import StoreCommands

MAX_LOAD_BODY = 2**20  # bytes
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Address:
    """The address of the daemon, and the function that stops the daemon."""

    url: str = ""
    key: str = ""  # the API key that TCP clients must send; empty: none
    names: tuple[str, ...] = ()  # more names that the Host header may have
    stop: Callable[[], None] = field(default=lambda: None)


def routes(models: Models, address: Address) -> list[Route]:
    """All routes of the daemon."""
    return _Api(models, address).routes()


class _Api:
    def __init__(self, models: Models, address: Address) -> None:
        self.models = models
        self.address = address
        self.metrics = Metrics()
        self.limit = models.settings.developer.max_body_mib * 2**20

    def routes(self) -> list[Route]:
        check = partial(check_admin, address=self.address)
        chat = Exchange(self.models, self.metrics, CHAT, VERSION, check)
        completion = Exchange(self.models, self.metrics, COMPLETION, VERSION, check)
        count_message = TokenCounter(self.models, self.limit, CountBody, CountBody.converted, TokenCount).__call__
        responses = ResponseRoutes(self.models, self.limit, ResponseStore(paths.responses_file()))
        openai_routes: list[tuple[str, str, Any]] = [
            ("POST", "/chat/completions", chat),
            ("POST", "/completions", completion),
            ("POST", "/responses", Exchange(self.models, self.metrics, responses.protocol, VERSION, check)),
            *responses.routes(),
            ("POST", "/messages", Exchange(self.models, self.metrics, MESSAGES, VERSION, check)),
            ("POST", "/messages/count_tokens", count_message),
            ("POST", "/embeddings", Embeddings(self.models, self.metrics, check)),
            ("POST", "/rerank", Reranking(self.models, self.metrics, check, RerankBody)),
            ("POST", "/score", Reranking(self.models, self.metrics, check, ScoreBody)),
            ("GET", "/models", self.cards),
            ("POST", "/models/load", self.for_admin(self.load_now)),
            ("POST", "/models/unload", self.for_admin(self.unload)),
            ("GET", "/models/{id:path}", self.card),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ]
        jobs = Jobs()
        library = Library(self.models, jobs, self.limit)
        ollama_routes: list[tuple[str, str, Any]] = [
            ("POST", "/api/chat", Exchange(self.models, self.metrics, ollama.CHAT, VERSION, check)),
            ("POST", "/api/generate", Exchange(self.models, self.metrics, ollama.GENERATE, VERSION, check)),
            ("POST", "/api/embed", Embeddings(self.models, self.metrics, check, EmbedBody)),
            ("POST", "/api/embeddings", Embeddings(self.models, self.metrics, check, EmbeddingsBody)),
            ("GET", "/api/version", library.version),
            ("GET", "/api/tags", library.tags),
            ("GET", "/api/ps", library.loaded),
            ("POST", "/api/show", library.show),
            ("POST", "/api/pull", self.for_admin(library.pull)),
            ("POST", "/api/copy", self.for_admin(library.copy)),
            ("DELETE", "/api/delete", self.for_admin(library.delete)),
        ]
        server = LlamaServer(self.models, self.limit)
        daemon_routes: list[tuple[str, str, Any]] = [
            ("GET", "/", self.root),
            ("GET", "/props", server.props),
            ("GET", "/slots", server.slots),
            ("POST", "/apply-template", server.apply_template),
            ("POST", "/infill", Exchange(self.models, self.metrics, INFILL, VERSION, check)),
            ("POST", "/v2/rerank", Reranking(self.models, self.metrics, check, RerankBody)),
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.figures),
            ("GET", "/openapi.json", self.openapi),
            ("GET", "/admin/status", self.for_admin(self.status)),
            ("GET", "/admin/models", self.for_admin(self.available)),
            ("GET", "/admin/loaded", self.for_admin(self.loaded)),
            ("POST", "/admin/load", self.for_admin(self.load)),
            ("POST", "/admin/unload", self.for_admin(self.unload)),
            ("POST", "/admin/shutdown", self.for_admin(self.shutdown)),
        ]
        adapters = AdapterRoutes(self.models, self.limit)
        store = StoreRoutes(self.models, jobs, self.limit)
        daemon_routes += [
            ("GET", "/admin/catalog", self.for_admin(store.catalog)),
            ("GET", "/admin/downloads", self.for_admin(store.downloads)),
            ("POST", "/admin/downloads", self.for_admin(store.start)),
            ("GET", "/admin/downloads/events", self.for_admin(store.events)),
            ("POST", "/admin/downloads/pause", self.for_admin(store.pause)),
            ("POST", "/admin/downloads/resume", self.for_admin(store.resume)),
            ("POST", "/admin/downloads/cancel", self.for_admin(store.cancel)),
            ("POST", "/admin/delete", self.for_admin(store.delete)),
        ]
        commands = StoreCommands(self.models, self.limit)
        daemon_routes += [(*route, self.for_admin(endpoint)) for route, endpoint in commands.routes()]
        openai_routes += [
            ("POST", "/load_lora_adapter", self.for_admin(adapters.load)),
            ("POST", "/unload_lora_adapter", self.for_admin(adapters.unload)),
        ]
        daemon_routes += [
            ("GET", "/admin/adapters", self.for_admin(adapters.folders)),
            ("GET", "/lora-adapters", self.for_admin(adapters.entries)),
            ("POST", "/lora-adapters", self.for_admin(adapters.set_scales)),
        ]
        routes = daemon_routes + openai_routes + ollama_routes
        routes += [(method, f"/v1{path}", endpoint) for method, path, endpoint in openai_routes]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in routes]

    def for_admin(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that calls `check_admin` before `endpoint`."""

        async def guarded(request: Request) -> Response:
            check_admin(request.scope, self.address)
            return await endpoint(request)

        return guarded

    async def root(self, request: Request) -> Response:
        """GET /: Ollama's clients look for this text to find a server."""
        return PlainTextResponse("Ollama is running")

    async def health(self, request: Request) -> Response:
        return _json({"status": "stopping" if self.models.stopping else "ok", "version": VERSION})

    async def figures(self, request: Request) -> Response:
        stats = {model.model: stats for model, stats in await self.models.stats() if stats is not None}
        return Response(self.metrics.render(stats, self.models.deaths), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        return _json(describe(VERSION))

    async def cards(self, request: Request) -> Response:
        models = await asyncio.to_thread(listing.examined)
        bases = {ref.id: self._card(ref, entry) for ref, entry in models if ref.is_complete}
        adapters = [
            _adapter_card(entry, bases[entry.model]) for entry in self.models.adapters() if entry.model in bases
        ]
        return _json({"object": "list", "data": [*bases.values(), *adapters]})

    async def card(self, request: Request) -> Response:
        name = request.path_params["id"]
        if is_path(name):
            raise ModelNotFound(f"model {name!r} is not on this machine", param="model")
        for entry in self.models.adapters():
            if name == f"{entry.model}:{entry.name}":
                base = await asyncio.to_thread(_checked_model, entry.model)
                return _json(_adapter_card(entry, self._card(*base)))
        return _json(self._card(*await asyncio.to_thread(_checked_model, name)))

    def _card(self, model: ModelRef, entry: ListedModel) -> dict[str, Any]:
        loaded = self.models.find(model.id)
        context = loaded.info.context if loaded and loaded.info else entry.context
        return {
            "id": model.id,
            "object": "model",
            "created": int(model.file.stat().st_mtime),
            "owned_by": "localllm",
            "loaded": loaded is not None,
            "max_model_len": context or None,
            "embeddings": _embeds(model, loaded.info if loaded else None),
        } | ({"problem": entry.problem} if entry.problem else {})

    async def tokenize(self, request: Request) -> Response:
        body, frame = await read_converted(
            request.scope, request.receive, TokenizeBody, self.limit, lambda body: body.frame(uuid.uuid4().hex)
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
        """Send one frame to a model; returns the reply and the description of the model."""
        async with await self.models.open(model, [frame], local=is_local(request.scope)) as stream:
            replies = await stream.take()
        return replies[0], stream.info

    async def status(self, request: Request) -> Response:
        settings = loading(self.models.settings)
        return _json(
            Status(
                version=VERSION,
                pid=os.getpid(),
                url=self.address.url,
                stopping=self.models.stopping,
                settings=settings,
                cache=paths.hub_cache_without_links(),
            )
        )

    async def available(self, request: Request) -> Response:
        available = await asyncio.to_thread(listing.listed)
        return _json(
            [
                ModelEntry(**msgspec.structs.asdict(model), loaded=self.models.find(model.id) is not None)
                for model in available
            ]
        )

    async def loaded(self, request: Request) -> Response:
        return _json(await self.models.loaded())

    async def load(self, request: Request) -> Response:
        """POST /admin/load."""
        body = await read_json(request.scope, request.receive, LoadBody, MAX_LOAD_BODY)

        async def work(report: Report) -> LoadedModel:
            return await self.models.load(
                body.model,
                local=is_local(request.scope),
                flags=body.flags,
                exact=body.exact,
                for_chat=body.for_chat,
                progress=lambda stage, done: report(LoadProgress(stage, done)),
            )

        return EventStream(work)

    async def load_now(self, request: Request) -> Response:
        """POST /v1/models/load: as POST /admin/load, with one document at the end."""
        body = await read_json(request.scope, request.receive, LoadBody, MAX_LOAD_BODY)
        work = self.models.load(
            body.model, local=is_local(request.scope), flags=body.flags, exact=body.exact, for_chat=body.for_chat
        )
        return _json(await unless_gone(request.receive, work))

    async def unload(self, request: Request) -> Response:
        body = await read_json(request.scope, request.receive, UnloadBody, self.limit)
        await self.models.unload(body.model)
        return _json({})

    async def shutdown(self, request: Request) -> Response:
        self.address.stop()
        return _json({}, status=202)


def _checked_model(name: str) -> tuple[ModelRef, ListedModel]:
    """The model of this name, and its entry of the list. Raises ModelNotFound."""
    model = resolved.model(name)
    return model, listing.entry_of(model)


def _embeds(model: ModelRef, info: frames.ModelInfo | None) -> bool | None:
    """Whether a model computes embeddings. None: unknown, because the header of a GGUF file takes long to read."""
    if info is not None:
        return info.embedding_size > 0
    if model.is_gguf:
        return None
    if not (model.path / MODULES).is_file():
        return False
    try:
        pooling = read_pooling(read_architecture(model.path))
    except ModelRefused:
        return False
    return pooling is not None and not pooling.problem


def _adapter_card(entry: AdapterEntry, base: dict[str, Any]) -> dict[str, Any]:
    """The model card of an adapter: the card of its base model with another id, and the base model as `parent`."""
    return base | {"id": f"{entry.model}:{entry.name}", "parent": entry.model}


def check_admin(scope: Scope, address: Address) -> None:
    """Raises Forbidden unless the request came over the unix socket, or the daemon has an API key.

    The guard `Keys` has already compared the key of the request.
    """
    if not is_local(scope) and not address.key:
        raise Forbidden("this route needs the unix socket or an API key")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    where = f"{request.method} {path[:200]}"
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        return error_response(
            MethodNotAllowed(f"{where}: method not allowed", hint=f"the route has {allowed}"), path, {"allow": allowed}
        )
    return error_response(RouteNotFound(f"{where}: unknown route", hint="GET /openapi.json lists the routes"), path)


def _methods(request: Request) -> list[str]:
    """The methods of all routes with the path of a request. HEAD is part of GET."""
    path = request.scope["path"]
    matching = [route for route in request.app.routes if route.path_regex.match(path)]
    return sorted({method for route in matching for method in route.methods})
