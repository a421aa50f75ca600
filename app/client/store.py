"""Calls of the model store of the daemon: find, download, check and delete models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from ...engine.files.quantization import Quant
from ..api.admin import Catalog, FileProgress, Installed, InstallProgress
from ..errors import DaemonUnreachable
from ..store.pull.jobs import Job
from ..store.records import (
    Fit,
    FitReport,
    Imported,
    Inspection,
    ModelFacts,
    ModelSettings,
    Pruning,
    SearchResult,
    Verification,
)
from .transport import Transport, absolute, full_name

OnFile = Callable[[FileProgress], None]
Result = TypeVar("Result")
Progress = TypeVar("Progress")


class StoreCalls(Transport):
    """The calls for models on this machine and on the hubs."""

    async def catalog(self) -> Catalog:
        """The device of this machine, and the models that can be downloaded."""
        return msgspec.json.decode(await self._get("/admin/catalog"), type=Catalog)

    async def downloads(self) -> list[Job]:
        return msgspec.json.decode(await self._get("/admin/downloads"), type=list[Job])

    async def download(self, name: str) -> Job:
        """Start a download in the daemon. It goes on when this client has ended."""
        return msgspec.json.decode(await self._post("/admin/downloads", {"name": name}), type=Job)

    async def change_download(self, name: str, action: str) -> Job:
        """`action`: pause, resume or cancel."""
        return msgspec.json.decode(await self._post(f"/admin/downloads/{action}", {"name": name}), type=Job)

    async def delete(self, model: str) -> None:
        """Unload a model and delete its files."""
        await self._post("/admin/delete", {"model": model})

    async def show(self, model: str) -> ModelFacts:
        """The facts about a model or an adapter on this machine."""
        return msgspec.json.decode(await self._post("/admin/show", {"model": full_name(model)}), type=ModelFacts)

    async def inspect(self, model: str) -> Inspection:
        """The architecture, the size and the usable backends of a model, also before it is downloaded."""
        return msgspec.json.decode(await self._post("/admin/inspect", {"model": full_name(model)}), type=Inspection)

    async def fit(
        self, model: str, *, context: int = 0, parallel: int = 1, quant: Quant | None = None, backend: str | None = None
    ) -> list[Fit]:
        """The memory of a model on each backend. `context`: 0 means the largest context that fits."""
        body = {"model": full_name(model), "context": context, "parallel": parallel, "quant": quant, "backend": backend}
        return msgspec.json.decode(await self._post("/admin/fit", body), type=FitReport).fits

    async def search(self, query: str, *, limit: int = 20, offline: bool = False) -> SearchResult:
        """The entries of the catalog and the repositories of the hub with these words."""
        body = {"query": query, "limit": limit, "offline": offline}
        return msgspec.json.decode(await self._post("/admin/search", body), type=SearchResult)

    async def verify(self, model: str, *, on_progress: OnFile | None = None) -> Verification:
        """Compare every file of a model with its hash. A cancelled call ends the work in the daemon."""
        return await self._work("/admin/verify", {"model": full_name(model)}, Verification, on_progress, FileProgress)

    async def prune(self, *, dry_run: bool = True, everything: bool = False) -> Pruning:
        """List the files in the cache that no model uses; without `dry_run`, delete them."""
        body = {"dry_run": dry_run, "everything": everything}
        return msgspec.json.decode(await self._post("/admin/prune", body), type=Pruning)

    async def import_model(
        self, path: str, name: str = "", *, copy: bool = False, on_progress: OnFile | None = None
    ) -> Imported:
        """Add a model folder to the store. A cancelled call ends the work in the daemon."""
        body = {"path": absolute(path), "name": name, "copy": copy}
        return await self._work("/admin/import", body, Imported, on_progress, FileProgress)

    async def install_llamacpp(self, *, on_progress: Callable[[InstallProgress], None] | None = None) -> Installed:
        """Install llama.cpp for GGUF models. A cancelled call ends the installation. Raises InstallFailed."""
        return await self._work("/admin/install", {}, Installed, on_progress, InstallProgress)

    async def aliases(self) -> dict[str, str]:
        """Alias -> name of a model."""
        return msgspec.json.decode(await self._get("/admin/aliases"), type=dict[str, str])

    async def set_alias(self, alias: str, name: str | None) -> dict[str, str]:
        """Add or replace an alias; None removes the alias. Returns all aliases."""
        body = {"alias": alias, "name": None if name is None else full_name(name)}
        return msgspec.json.decode(await self._post("/admin/alias", body), type=dict[str, str])

    async def configure(self, model: str, changes: dict[str, str]) -> dict[str, Any]:
        """Change the settings of one model; an empty text removes a setting. Returns all settings of the model."""
        reply = await self._post("/admin/settings", {"model": full_name(model), "changes": changes})
        return msgspec.json.decode(reply, type=ModelSettings).settings

    async def _work(
        self,
        path: str,
        body: dict[str, Any],
        kind: type[Result],
        on_progress: Callable[[Progress], None] | None,
        progress: type[Progress],
    ) -> Result:
        """The last event of some work, after its events of progress."""
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                if "done" not in event:
                    return msgspec.convert(event, kind)
                if on_progress is not None:
                    on_progress(msgspec.convert(event, progress))
        raise DaemonUnreachable("the daemon stopped before the end of the work")
