"""The routes of the model store: the catalog, downloads in the background, and the removal of models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..store import catalog
from ..store.changes import deletion
from ..store.local import snapshots
from ..store.offers import offers
from ..store.pull.jobs import ENDED, Job, Jobs
from . import keep_alive
from .admin import Catalog, DeleteBody, DownloadBody
from .answers import event
from .body import read_json
from .models import Models

EVENT_SECONDS = 0.25  # seconds between two events


class StoreRoutes:
    """The handlers of the store's routes."""

    def __init__(self, models: Models, jobs: Jobs, limit: int) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self.models = models
        self.jobs = jobs
        self.limit = limit

    async def catalog(self, request: Request) -> Response:
        """GET /admin/catalog: this machine, and the models that it can download."""
        machine = await self.models.machine()
        installed = [model.id for model in await asyncio.to_thread(snapshots.available)]
        return _json(Catalog(machine=machine, offers=offers(catalog.entries(), machine, installed)))

    async def downloads(self, request: Request) -> Response:
        """GET /admin/downloads."""
        return _json(self.jobs.list())

    async def start(self, request: Request) -> Response:
        """POST /admin/downloads. The download runs in the daemon and goes on when the client has ended."""
        return await self._change(request, self.jobs.start)

    async def pause(self, request: Request) -> Response:
        """POST /admin/downloads/pause."""
        return await self._change(request, self.jobs.pause)

    async def resume(self, request: Request) -> Response:
        """POST /admin/downloads/resume."""
        return await self._change(request, self.jobs.resume)

    async def cancel(self, request: Request) -> Response:
        """POST /admin/downloads/cancel."""
        return await self._change(request, self.jobs.cancel)

    async def events(self, request: Request) -> Response:
        """GET /admin/downloads/events: server-sent events with the list of downloads, until all have ended."""
        headers = {"cache-control": "no-cache"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        """POST /admin/delete: unload a model, delete its files and remove the aliases of these files."""
        body = await read_json(request.scope, request.receive, DeleteBody, self.limit)
        removal = await asyncio.to_thread(deletion.plan_removal, body.model)
        async with self.models.without(removal.folders):
            await asyncio.to_thread(removal.execute)
        return _json(removal.result)

    async def _change(self, request: Request, action: Callable[[str], Job]) -> Response:
        body = await read_json(request.scope, request.receive, DownloadBody, self.limit)
        return _json(await asyncio.to_thread(action, body.name))

    async def _events(self) -> AsyncIterator[bytes]:
        previous: list[Job] | None = None
        deadline = keep_alive.Deadline()
        while True:
            jobs = self.jobs.list()
            if jobs != previous or deadline.passed:
                deadline.restart()
                yield keep_alive.COMMENT if jobs == previous else event(jobs)
            if all(job.state in ENDED for job in jobs):
                return
            previous = jobs
            with contextlib.suppress(TimeoutError):
                async with deadline.timeout():
                    await asyncio.sleep(EVENT_SECONDS)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
