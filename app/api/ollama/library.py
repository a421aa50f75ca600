"""Ollama's routes for the models on this machine: tags, ps, show, pull, delete, copy and version."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...errors import DownloadFailed, ModelNotFound
from ...store import listing, resolved
from ...store.changes import deletion
from ...store.names import is_path
from ...store.pull.jobs import ENDED, Job, Jobs
from ...store.records import ListedModel, ModelFacts
from ...version import VERSION
from .. import commands
from ..admin import AliasBody, LoadedModel, ModelBody
from ..body import Body, WireBody, read_json
from ..inputs import Name
from ..models import Models
from ..places import Places
from .answer import LINES
from .bodies import Options, plain_name
from .errors import error_body

POLL_SECONDS = 0.25  # between two lines of a download
RUNNING, WAITING = 2, 16  # child processes for /api/show


class NamedBody(WireBody, kw_only=True):
    """A body with the name of a model; `name` is its older field."""

    model: Name | None = None
    name: Name | None = None

    @property
    def target(self) -> str:
        """Raises ModelNotFound for a path, and without a name."""
        name = plain_name(self.model or self.name or "")
        if not name or is_path(name):
            raise ModelNotFound(f"model {name[:200]!r} is not on this machine", param="model")
        return name


class ShowBody(NamedBody, kw_only=True):
    """POST /api/show."""

    verbose: bool | None = None  # without effect: the reply has no lists of tokens
    options: Options | None = None
    system: Literal[""] | None = None
    template: Literal[""] | None = None


class PullBody(NamedBody, kw_only=True):
    """POST /api/pull."""

    stream: bool | None = None
    insecure: Literal[False] | None = None


class CopyBody(WireBody):
    """POST /api/copy: the destination becomes an alias of the source."""

    source: Name
    destination: Name


class Library:
    """The handlers."""

    def __init__(self, models: Models, jobs: Jobs, limit: int) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self.models = models
        self.jobs = jobs
        self.limit = limit
        self.places = Places("show or change models", running=RUNNING, waiting=WAITING)

    async def version(self, request: Request) -> Response:
        """GET /api/version."""
        return _json({"version": VERSION})

    async def tags(self, request: Request) -> Response:
        """GET /api/tags: the models that can be used."""
        models = await asyncio.to_thread(listing.examined)
        usable = [(ref, entry) for ref, entry in models if ref.is_complete and not entry.problem]
        return _json(
            {
                "models": [
                    _names(entry.id)
                    | {"modified_at": _time(ref.file.stat().st_mtime), "size": entry.size}
                    | {"digest": _digest(entry.id), "details": _details(entry)}
                    for ref, entry in usable
                ]
            }
        )

    async def loaded(self, request: Request) -> Response:
        """GET /api/ps: the loaded models."""
        ready = [model for model in await self.models.loaded() if model.state == "ready"]
        return _json({"models": [_running(model) for model in ready]})

    async def show(self, request: Request) -> Response:
        """POST /api/show."""
        body = await self._read(request, ShowBody)
        async with self.places.enter():
            reply = await commands.run("show", ModelBody(model=body.target))
        return _json(_shown(msgspec.json.decode(reply, type=ModelFacts)))

    async def delete(self, request: Request) -> Response:
        """DELETE /api/delete: unload a model and delete its files."""
        body = await self._read(request, NamedBody)
        removal = await asyncio.to_thread(deletion.plan_removal, body.target)
        async with self.models.without(removal.folders):
            await asyncio.to_thread(removal.execute)
        return Response()

    async def copy(self, request: Request) -> Response:
        """POST /api/copy."""
        body = await self._read(request, CopyBody)
        source = NamedBody(model=body.source).target
        async with self.places.enter():
            await commands.run("alias", AliasBody(alias=plain_name(body.destination), name=source))
        return Response()

    async def pull(self, request: Request) -> Response:
        """POST /api/pull. The download goes on if the client disconnects."""
        body = await self._read(request, PullBody)
        name = body.target
        with contextlib.suppress(ModelNotFound):
            await asyncio.to_thread(resolved.stored, name)
            return self._pulled(body, _already())
        await asyncio.to_thread(self.jobs.start, name)
        if body.stream is False:
            job = [job async for job in self._states(name)][-1]
            _check(job)
            return _json({"status": "success"})
        return self._pulled(body, self._lines(name))

    def _pulled(self, body: PullBody, lines: AsyncIterator[bytes]) -> Response:
        if body.stream is False:
            return _json({"status": "success"})
        return StreamingResponse(lines, media_type=LINES.media.decode())

    async def _states(self, name: str) -> AsyncIterator[Job]:
        """The states of a download, up to its end."""
        while True:
            job = next((job for job in self.jobs.list() if job.name == name), None)
            if job is None:
                return
            yield job
            if job.state in ENDED:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _lines(self, name: str) -> AsyncIterator[bytes]:
        digest = f"sha256:{_digest(name)}"
        yield _line({"status": "pulling manifest"})
        async for job in self._states(name):
            if job.state in ("downloading", "paused", "done") and job.total:
                status = f"pulling {digest[7:19]}"
                yield _line({"status": status, "digest": digest, "total": job.total, "completed": job.received})
            if job.state == "done":
                yield _line({"status": "success"})
            elif job.state in ENDED:
                yield error_body(_failure(job)) + b"\n"

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return await read_json(request.scope, request.receive, kind, self.limit)


async def _already() -> AsyncIterator[bytes]:
    yield _line({"status": "pulling manifest"})
    yield _line({"status": "success"})


def _failure(job: Job) -> DownloadFailed:
    return DownloadFailed(job.error or f"the download was {job.state}", hint=job.hint)


def _check(job: Job) -> None:
    """Raises DownloadFailed unless the download is complete."""
    if job.state != "done":
        raise _failure(job)


def _names(name: str) -> dict[str, Any]:
    return {"name": name, "model": name}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(name: str) -> str:
    """64 hexadecimal digits for a model: clients compare them and show their beginning."""
    return hashlib.sha256(name.encode()).hexdigest()


def _details(entry: ListedModel) -> dict[str, Any]:
    family = entry.description.split(" ")[0].rstrip(",")
    return {
        "parent_model": "",
        "format": "gguf" if entry.gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _running(model: LoadedModel) -> dict[str, Any]:
    """A loaded model. One without an end of its life ends in a hundred years, as in Ollama."""
    remaining = 3.2e9 if model.unload_in is None else model.unload_in
    details = {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": ""}
    return _names(model.id) | {
        "size": model.memory,
        "digest": _digest(model.id),
        "details": details | {"quantization_level": model.quant},
        "expires_at": _time(time.time() + remaining),
        "context_length": model.context,
    }


def _shown(facts: ModelFacts) -> dict[str, Any]:
    """The facts about a model. `capabilities` are those that its files show."""
    family = facts.description.split(" ")[0].rstrip(",")
    capabilities = ["embedding"] if facts.embeddings else ["completion"]
    if facts.template is not None and facts.template.tools:
        capabilities.append("tools")
    information: dict[str, Any] = {"general.architecture": family, "general.basename": facts.id}
    if facts.context:
        information[f"{family}.context_length"] = facts.context
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.settings.items()),
        "template": "",
        "license": facts.licence,
        "modified_at": facts.stored,
        "details": {
            "parent_model": facts.base,
            "format": "gguf" if facts.kind == "gguf" else "safetensors",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": "",
            "quantization_level": facts.weights[0].dtype if facts.weights else "",
        },
        "model_info": information,
        "capabilities": capabilities,
    }


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
