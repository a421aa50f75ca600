"""The routes for the commands of the store: show, inspect, fit, search, verify, prune, import, alias, config."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import config
from ..errors import ConfigError, Forbidden, InvalidRequest
from ..store import listing, preferences
from ..store.installing import install
from ..store.local import stored
from ..store.names import is_path
from . import commands
from .admin import (
    AliasBody,
    ConfigureBody,
    FitBody,
    ImportBody,
    Imported,
    Installed,
    InstallProgress,
    ModelBody,
    PruneBody,
    SearchBody,
    Verification,
)
from .body import Body, is_local, read_json
from .events import EventStream, Report
from .exchange import unless_gone
from .file_work import FileWork, import_folder, verify
from .models import Models
from .places import Places

RUNNING = 2  # child processes at the same time
WAITING = 16
PRUNE_SECONDS = 1800.0  # maximum duration: a cache may have very many files

Endpoint = Callable[[Request], Awaitable[Response]]


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
        body = await self._read(request, ModelBody)
        _check_name(request, body.model)
        return _json(await self._run(request, commands.run("show", body.model)))

    async def inspect(self, request: Request) -> Response:
        """POST /admin/inspect. The reply is store.inspection.Inspection."""
        body = await self._read(request, ModelBody)
        _check_name(request, body.model)
        return _json(await self._run(request, commands.run("inspect", body.model), uses_hub=True))

    async def fit(self, request: Request) -> Response:
        """POST /admin/fit. The reply is a list of store.records.Fit."""
        body = await self._read(request, FitBody)
        _check_name(request, body.model)
        flags = [f"--context={body.context}", f"--parallel={body.parallel}"]
        if quant := body.quant or self._flag("quant"):
            flags.append(f"--quant={quant}")
        if backend := body.backend or self._flag("backend"):
            flags.append(f"--backend={backend}")
        result = await self._run(request, commands.run("fit", body.model, flags=flags), uses_hub=True)
        return _json(result["fits"])

    async def search(self, request: Request) -> Response:
        """POST /admin/search. The reply is a SearchResult."""
        body = await self._read(request, SearchBody)
        flags = [f"--limit={body.limit}"]
        if body.offline:
            flags.append("--offline")
        command = commands.run("search", *body.query.split(), flags=flags, param="query")
        return _json(await self._run(request, command, uses_hub=True))

    async def prune(self, request: Request) -> Response:
        """POST /admin/prune. The reply is a Pruning."""
        body = await self._read(request, PruneBody)
        flags = ["--dry-run" if body.dry_run else "--yes"]
        if body.everything:
            flags.append("--all")
        return _json(await self._run(request, commands.run("prune", flags=flags, seconds=PRUNE_SECONDS)))

    async def alias(self, request: Request) -> Response:
        """POST /admin/alias. The reply is the aliases after the change."""
        body = await self._read(request, AliasBody)
        if body.name is None:
            work = commands.run("alias", body.alias, flags=["--rm"], param="alias")
        else:
            _check_name(request, body.name)
            work = commands.run("alias", body.alias, body.name, param="alias")
        return _json(await self._run(request, work))

    async def aliases(self, request: Request) -> Response:
        """GET /admin/aliases: alias -> name."""
        return _json(preferences.read().aliases)

    async def configure(self, request: Request) -> Response:
        """POST /admin/settings. The reply is the settings of the model after the changes."""
        body = await self._read(request, ConfigureBody)
        _check_name(request, body.model)
        _check_settings(body)
        changes = [f"{name}={text}" for name, text in body.changes.items()]
        result = await self._run(request, commands.run("config", body.model, *changes))
        return _json(result["settings"])

    async def verify(self, request: Request) -> Response:
        """POST /admin/verify. The reply is server-sent events: FileProgress, then a Verification or an error."""
        body = await self._read(request, ModelBody)
        if is_path(body.model):
            raise InvalidRequest(f"{body.model[:200]!r} is a folder, whose files have no hashes", param="model")
        model = await asyncio.to_thread(stored.resolve, body.model)
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

    async def _run(self, request: Request, command: Coroutine[Any, Any, Any], *, uses_hub: bool = False) -> Any:
        """The result of a command. The command ends if the client disconnects."""
        places = self.hub_places if uses_hub else self.places
        return await unless_gone(request.receive, _in_place(places, command))

    def _flag(self, name: str) -> object:
        """The value of a setting that a flag of `localllm serve` has set: it applies to every load. None: no flag."""
        settings = self.models.settings
        return getattr(settings, name) if name in settings.flags else None


async def _in_place(places: Places, command: Coroutine[Any, Any, Any]) -> Any:
    try:
        async with places.enter():
            return await command
    finally:
        command.close()  # without effect after its end


def _check_name(request: Request, name: str) -> None:
    """Raises Forbidden for a path from a TCP client, which must not learn which files exist."""
    if is_path(name) and not is_local(request.scope):
        raise Forbidden(
            f"{name[:200]!r} is a path; the model must be a name", hint="clients on the unix socket may name a folder"
        )


def _check_settings(body: ConfigureBody) -> None:
    """Raises InvalidRequest for a setting that a model cannot have, or a wrong value. The command would take a name
    with = as a setting of all models."""
    if "=" in body.model and not is_path(body.model):
        raise InvalidRequest(f"{body.model[:200]!r} is not the name of a model", param="model")
    try:
        values = {name: config.value_of(name, text) for name, text in body.changes.items() if text}
        config.check_model_settings(body.model, values)
    except ConfigError as error:
        raise InvalidRequest(error.message, hint=error.hint, param="changes") from None


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
