"""The routes for the commands of the store: show, inspect, fit, search, verify, prune, import, alias, config."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import Forbidden, InvalidRequest
from ..store import listing, preferences, resolved
from ..store.changes.installing import install
from ..store.local.verify import verify
from ..store.names import is_path
from ..store.records import Imported, Verification
from . import commands
from .admin import (
    AliasBody,
    ConfigureBody,
    FitBody,
    ImportBody,
    Installed,
    InstallProgress,
    ModelBody,
    PruneBody,
    SearchBody,
)
from .body import Body, WireBody, is_local, read_json
from .events import EventStream, Report
from .exchange import unless_gone
from .file_work import FileWork, import_folder
from .models import Models
from .places import Places

RUNNING = 2  # child processes at the same time
WAITING = 16
PRUNE_SECONDS = 1800.0  # maximum duration: a cache may have very many files

Endpoint = Callable[[Request], Awaitable[Response]]
OfModel = TypeVar("OfModel", ModelBody, FitBody, ConfigureBody)


class StoreCommands:
    """The handlers. Commands run in child processes; hashing and copying run in threads."""

    def __init__(self, models: Models, limit: int) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self.models = models
        self.limit = limit
        # Commands that may wait for a hub have places of their own, so that the others do not wait for the hub.
        self.hub_places = Places("inspect or search models", running=RUNNING, waiting=WAITING)
        self.places = Places("show or change models", running=RUNNING, waiting=WAITING)
        self.file_work = FileWork()
        self.install_places = Places("install llama.cpp", running=1, waiting=0)

    def routes(self) -> list[tuple[tuple[str, str], Endpoint]]:
        """Method and path, and the handler."""
        return [
            (("POST", "/admin/show"), self.show),
            (("POST", "/admin/inspect"), self.inspect),
            (("POST", "/admin/fit"), self.fit),
            (("POST", "/admin/search"), self.search),
            (("POST", "/admin/verify"), self.verify),
            (("POST", "/admin/prune"), self.prune),
            (("POST", "/admin/import"), self.import_),
            (("POST", "/admin/install"), self.install),
            (("POST", "/admin/alias"), self.alias),
            (("GET", "/admin/aliases"), self.aliases),
            (("POST", "/admin/settings"), self.configure),
        ]

    async def show(self, request: Request) -> Response:
        """POST /admin/show. The reply is ModelFacts."""
        return await self._run(request, "show", await self._model(request, ModelBody))

    async def inspect(self, request: Request) -> Response:
        """POST /admin/inspect. The reply is an Inspection."""
        return await self._run(request, "inspect", await self._model(request, ModelBody), uses_hub=True)

    async def fit(self, request: Request) -> Response:
        """POST /admin/fit. The reply is a FitReport."""
        body = await self._model(request, FitBody)
        flags = {"quant": body.quant or self._flag("quant"), "backend": body.backend or self._flag("backend")}
        return await self._run(request, "fit", msgspec.structs.replace(body, **flags), uses_hub=True)

    async def search(self, request: Request) -> Response:
        """POST /admin/search. The reply is a SearchResult."""
        return await self._run(request, "search", await self._read(request, SearchBody), uses_hub=True)

    async def prune(self, request: Request) -> Response:
        """POST /admin/prune. The reply is a Pruning."""
        return await self._run(request, "prune", await self._read(request, PruneBody), seconds=PRUNE_SECONDS)

    async def alias(self, request: Request) -> Response:
        """POST /admin/alias. The reply is the aliases after the change."""
        body = await self._read(request, AliasBody)
        _check_name(request, body.name or "")
        return await self._run(request, "alias", body)

    async def aliases(self, request: Request) -> Response:
        """GET /admin/aliases: alias -> name."""
        return _json(preferences.read().aliases)

    async def configure(self, request: Request) -> Response:
        """POST /admin/settings. The reply is ModelSettings, after the changes."""
        return await self._run(request, "settings", await self._model(request, ConfigureBody))

    async def verify(self, request: Request) -> Response:
        """POST /admin/verify. The reply is server-sent events: FileProgress, then a Verification or an error."""
        body = await self._read(request, ModelBody)
        if is_path(body.model):
            raise InvalidRequest(f"{body.model[:200]!r} is a folder, whose files have no hashes", param="model")
        model = await asyncio.to_thread(resolved.stored, body.model)
        self.file_work.places.check()

        async def work(report: Report) -> Verification:
            return await self.file_work.run(lambda progress: verify(model, progress), report)

        return EventStream(work)

    async def import_(self, request: Request) -> Response:
        """POST /admin/import. The reply is server-sent events: FileProgress, then Imported or an error."""
        body = await self._read(request, ImportBody)
        if not is_local(request.scope):
            raise Forbidden("only clients on the unix socket may import a folder")
        if not body.path.startswith(("/", "~/")) or not body.path.isprintable():
            raise InvalidRequest(f"{body.path[:200]!r} is not an absolute path", param="path")
        self.file_work.places.check()

        async def work(report: Report) -> Imported:
            return await self.file_work.run(lambda progress: import_folder(body, progress), report)

        return EventStream(work)

    async def install(self, request: Request) -> Response:
        """POST /admin/install: install llama.cpp, until the client disconnects.

        The reply is server-sent events: InstallProgress, then Installed or an error.
        """
        if not is_local(request.scope):
            raise Forbidden("only clients on the unix socket may install a package")
        self.install_places.check()

        async def work(report: Report) -> Installed:
            async with self.install_places.enter():
                await install(lambda *progress: report(InstallProgress(*progress)))
                await asyncio.to_thread(listing.listed, wait=True)  # asks the backends about the GGUF models again
            return Installed("llama.cpp")

        return EventStream(work)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return await read_json(request.scope, request.receive, kind, self.limit)

    async def _model(self, request: Request, kind: type[OfModel]) -> OfModel:
        """A body with the name of a model, which only a client on the unix socket may give as a path."""
        body = await self._read(request, kind)
        _check_name(request, body.model)
        return body

    async def _run(
        self, request: Request, work: str, body: WireBody, *, uses_hub: bool = False, seconds: float = 0.0
    ) -> Response:
        """The result of some work in a child process, which ends if the client disconnects."""

        async def in_place() -> bytes:
            async with (self.hub_places if uses_hub else self.places).enter():
                return await commands.run(work, body, seconds)

        return Response(await unless_gone(request.receive, in_place()), media_type="application/json")

    def _flag(self, name: str) -> Any:
        """The value of a setting that a flag of `localllm serve` has set: it applies to every load. None: no flag."""
        settings = self.models.settings
        return getattr(settings, name) if name in settings.flags else None


def _check_name(request: Request, name: str) -> None:
    """Raises Forbidden for a path from a TCP client, which must not learn which files exist."""
    if is_path(name) and not is_local(request.scope):
        raise Forbidden(
            f"{name[:200]!r} is a path; the model must be a name", hint="clients on the unix socket may name a folder"
        )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
