"""Manages the loaded models. Each has a worker process, which starts at the first request and stops when idle."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .. import config, paths
from ..api.admin import AdapterEntry, LoadedModel, LoadFlags
from ..api.models import Progress, Request
from ..api.stream import Stream
from ..config import Settings
from ..errors import (
    AppError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    OtherOptions,
    Overloaded,
    Stopping,
)
from ..frames import Generate, Stats
from ..purpose import Use, check_use
from ..store import listing, resolved
from ..store.local.refs import ModelRef
from ..store.names import is_path
from .adapters import Adapters
from .description import describe
from .loading import LoadRequest, as_flags, check_backend, check_embeddings, load_frame, load_settings
from .machine import MachineProbe
from .names import Names, is_inside
from .process import COMMAND, WorkerProcess

STOPPING = "the daemon is stopping"
NO_FLAGS = LoadFlags()
IDLE_SECONDS = 1.0  # maximum time between two checks for idle models
STATS_SECONDS = 1.0  # maximum wait for the statistics of a worker; later statistics are ignored

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A model that is loaded or loads, and the tasks that load and unload it."""

    ref: ModelRef
    settings: Settings  # the settings that load the model, with those of the model and the flags of the call
    worker: WorkerProcess
    loading: asyncio.Task[object]
    lifetime: float  # seconds without a request after which the model is unloaded; infinite: never
    unloading: asyncio.Task[None] | None = None


class LoadedModels:
    """The loaded models. `deaths` counts the workers that ended unexpectedly, by model."""

    def __init__(self, settings: Settings, *, command: Sequence[str] = COMMAND, log_dir: Path | None = None) -> None:
        self.settings = settings
        self.stopping = False
        self.deaths: dict[str, int] = {}
        self._command = command
        self._log_dir = log_dir or paths.log_dir()
        self._entries: dict[str, _Entry] = {}
        self._adapters = Adapters()
        self._names = Names(self._entries, self._adapters)
        self.machine = MachineProbe()
        # Workers that have ended. Their processes may still exist and use memory; the next load waits for them.
        self._ended: list[WorkerProcess] = []
        self._blocked: list[Path] = []  # folders that are being deleted
        self._load_lock = asyncio.Lock()  # one load at a time: two loads would both count on the same free memory
        self._idle_task: asyncio.Task[None] | None = None

    async def worker(
        self,
        name: str,
        *,
        local: bool = False,
        flags: LoadFlags = NO_FLAGS,
        exact: bool = False,
        progress: Progress | None = None,
    ) -> WorkerProcess:
        """The ready worker of a model. The parameters and errors are those of `load`."""
        ref = await self._names.resolve(name, local)
        entry = await self._entry(ref, self._request(ref, flags, exact=exact), progress, keeps=True)
        return entry.worker

    def _request(self, ref: ModelRef, flags: LoadFlags, *, exact: bool = False) -> LoadRequest:
        """Raises ConfigError for a malformed setting of the model."""
        return LoadRequest(flags, load_settings(self.settings, ref.id, flags), exact)

    async def _entry(
        self, ref: ModelRef, request: LoadRequest, progress: Progress | None = None, *, keeps: bool = False
    ) -> _Entry:
        """A model with a ready worker. Starts the worker if necessary; concurrent calls wait for the same worker.

        A loaded model that does not have the options of the request is loaded again if it is idle. `keeps`: if it is
        busy and only its settings differ, it stays as it is. Raises the error of a failed load, Stopping, or
        InvalidRequest if the model is busy with other options.
        """
        backend = request.flags.backend
        while True:
            entry = await self._loaded_entry(ref, request.settings, progress)
            if entry is None:
                continue
            mismatch = request.mismatch(entry.worker, entry.settings)
            if mismatch is None:
                return entry
            if entry.worker.unfinished:
                if keeps and isinstance(mismatch, OtherOptions):
                    return entry
                raise mismatch
            if mismatch.param == "backend" and backend is not None:
                await check_backend(backend, ref)  # before the loaded worker is stopped
                backend = None
                continue
            await asyncio.shield(self._unload_task(entry, drain=0.0))

    async def _loaded_entry(self, ref: ModelRef, settings: Settings, progress: Progress | None) -> _Entry | None:
        """Wait for the load of a model, which this call starts if necessary. None: the model was unloaded meanwhile."""
        self._refuse_when_stopping()
        if is_inside(ref.path, self._blocked):
            raise ModelNotFound(f"model {ref.id} is being deleted", param="model")
        entry = self._entries.get(ref.id) or self._start(ref, settings)
        if entry.unloading is not None:
            await asyncio.shield(entry.unloading)
            return None
        if progress is not None:
            entry.worker.listeners.append(progress)
        try:
            await asyncio.shield(entry.loading)
        except Stopping:
            raise
        except AppError:
            if config.loading(entry.settings) == config.loading(settings):
                raise
            return None  # another call chose the options that failed
        return entry if entry.worker.state == "ready" else None

    async def open(
        self,
        name: str | None,
        requests: Sequence[Request],
        *,
        weight: int = 1,
        local: bool = False,
        flags: LoadFlags | None = None,
        lifetime: float | None = None,
    ) -> Stream:
        """Load the model if necessary and send requests to it. The stream returns the replies.

        `name`: a model, `model:adapter`, or an adapter that only one model has; None selects the only loaded model.
        `weight`: number of answers to the requests. `local`: the client uses the unix socket and may name a folder.
        `flags`: the model must be loaded with these flags; None: the requests use the model as it is loaded.
        `lifetime`: seconds that the model stays loaded after its last request; None: unchanged.
        Raises ModelNotFound; the errors of `_entry`; InvalidRequest if `weight` exceeds the setting max_queue;
        EmbeddingsUnsupported for embeddings of a model whose files describe no pooling;
        Overloaded if `weight` and the unfinished answers of the worker together exceed max_queue; AdapterNotFound;
        AdapterUnusable if the files of the adapter are missing after a reload of the model.
        """
        self._refuse_when_stopping()
        limit = self.settings.max_queue
        if weight > limit:
            raise InvalidRequest(
                f"a request for {weight} answers exceeds the limit of {limit}",
                hint="to raise the limit, use the setting max_queue",
                param="n",
            )
        ref, adapter = await self._names.select(name, local)
        self._adapters.check(ref.id, adapter, requests)  # before a load, which may take minutes
        check_embeddings(ref, requests)
        await self._check_purpose(ref, requests)
        request = self._request(ref, flags or NO_FLAGS, exact=flags is not None)
        entry = await self._entry(ref, request)
        worker = entry.worker
        entry.lifetime = entry.lifetime if lifetime is None else lifetime
        selected, requests = await self._adapters.prepare(worker, adapter, requests)
        if worker.unfinished + weight > limit:
            raise Overloaded(
                f"{worker.model} has {worker.unfinished} unfinished answers; {weight} more exceed the limit of {limit}",
                hint="try again later; to raise the limit, use the setting max_queue",
            )
        stream = worker.open(requests, weight)
        stream.adapter = selected
        return stream

    async def load(
        self,
        name: str,
        *,
        local: bool = False,
        flags: LoadFlags = NO_FLAGS,
        exact: bool = False,
        for_chat: bool = False,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Load a model or `model:adapter`, and describe it.

        `flags` precede the settings. `exact`: if the model is idle and was loaded with other settings than this call
        would load it with, load it again; if it is busy, the field `kept` of the description is true. `for_chat`: raise
        WrongKind for a model that does not chat.
        Raises ModelNotFound, the errors of `_entry`, AdapterNotFound, or ConfigError for a malformed setting of the
        model.
        """
        ref, adapter = await self._names.select(name, local)
        if for_chat:
            check_use(ref.id, await asyncio.to_thread(listing.purpose, ref), "chat")
        self._adapters.check(ref.id, adapter, ())
        request = self._request(ref, flags, exact=exact)
        entry = await self._entry(ref, request, progress, keeps=True)
        kept = request.mismatch(entry.worker, entry.settings) is not None
        description = self._describe(entry, await entry.worker.stats(STATS_SECONDS))
        return msgspec.structs.replace(description, kept=kept)

    async def _check_purpose(self, ref: ModelRef, requests: Sequence[Request]) -> None:
        """Raises WrongKind before a load, which may take minutes. The worker of a loaded model checks its requests."""
        if ref.id in self._entries:
            return
        for request in requests:
            if isinstance(request, Generate):
                use: Use = "chat" if request.prompt is None else "text"
                check_use(ref.id, await asyncio.to_thread(listing.purpose, ref), use)

    def find(self, model_id: str) -> WorkerProcess | None:
        """The worker of a loaded or loading model; None if there is none."""
        entry = self._entries.get(model_id)
        return entry.worker if entry else None

    async def stats(self) -> list[tuple[WorkerProcess, Stats | None]]:
        """Every worker and its statistics; the statistics are None while the worker loads or does not respond."""
        workers = [entry.worker for entry in self._entries.values()]
        stats = await asyncio.gather(*(worker.stats(STATS_SECONDS) for worker in workers))
        return list(zip(workers, stats, strict=True))

    async def loaded(self) -> list[LoadedModel]:
        entries = list(self._entries.values())
        stats = await asyncio.gather(*(entry.worker.stats(STATS_SECONDS) for entry in entries))
        described = zip(entries, stats, strict=True)
        return [self._describe(entry, figures) for entry, figures in described if entry.worker.state != "over"]

    def _describe(self, entry: _Entry, stats: Stats | None) -> LoadedModel:
        options = as_flags(entry.settings, self.settings)
        return describe(entry.worker, stats, entry.lifetime, options)

    def adapters(self) -> list[AdapterEntry]:
        """The adapters of all models, in the order in which they were first loaded."""
        return self._adapters.entries()

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        model: str | None = None,
        local: bool = False,
        replace: bool = False,
        reuse: bool = False,
        pinned: bool = False,
    ) -> AdapterEntry:
        """Load an adapter for a model, which is loaded if necessary. `path`: a folder, or a name in the model cache.

        `model`: None selects the only loaded model. Raises ModelNotFound; the errors of `_entry`; Forbidden for a
        folder if the client is not `local`; AdapterNotFound for a missing folder; the errors of `Adapters.load`.
        """
        if not local and is_path(path):
            raise Forbidden(
                "lora_path must be the name of a downloaded adapter, not a path",
                hint="clients on the unix socket may name a folder",
            )
        folder = await asyncio.to_thread(resolved.adapter, path, allow_path=local)
        worker = await self.worker(model or self._names.only(), local=local)
        return await self._adapters.load(worker, name, folder.path, replace=replace, reuse=reuse, pinned=pinned)

    async def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        """Unload an adapter; requests that run with it go on.

        `model`: None selects the only model with an adapter of this name. Raises AdapterNotFound, InvalidRequest.
        """
        await self._adapters.unload(model or self._adapters.find_model(name), name)

    def set_adapter_scales(self, scales: Mapping[int, float]) -> None:
        """Set the default scales by adapter id; an adapter that is not in `scales` gets 0.

        Raises AdapterNotFound, or InvalidRequest if two adapters of a model would have a scale.
        """
        self._adapters.set_scales(scales)

    async def unload(self, name: str) -> None:
        """Stop the worker of a model; its requests have `drain` seconds to finish. Its adapters are forgotten.

        Raises ModelNotFound if the model is not loaded.
        """
        self._adapters.forget(name)
        entry = self._entries.get(name)
        if entry is None:
            loaded = ", ".join(self._entries) or "none"
            raise ModelNotFound(f"model {name!r} is not loaded", hint=f"loaded: {loaded}", param="model")
        await asyncio.shield(self._unload_task(entry, self.settings.developer.drain))
        self._adapters.forget(name)  # again: a load of an adapter may have ended during the unload

    @asynccontextmanager
    async def without(self, folders: Sequence[Path]) -> AsyncIterator[None]:
        """Unload the models with files in these folders; until the end of the block, no call loads them again."""
        self._blocked += folders
        try:
            entries = [entry for entry in self._entries.values() if is_inside(entry.ref.path, folders)]
            for entry in entries:
                self._adapters.forget(entry.ref.id)
            await asyncio.gather(*(self._unload_task(entry, self.settings.developer.drain) for entry in entries))
            yield
        finally:
            for folder in folders:
                self._blocked.remove(folder)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests from now on; returns when no request is running, or after `seconds`."""
        self.stopping = True
        await asyncio.gather(*(entry.worker.wait_idle(seconds) for entry in self._entries.values()))

    async def close(self) -> None:
        """Stop all workers; running requests get the error Stopping."""
        self.stopping = True
        if self._idle_task is not None:
            self._idle_task.cancel()
        await asyncio.gather(*(self._unload_task(entry, drain=0.0) for entry in list(self._entries.values())))

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping(STOPPING)

    def _start(self, ref: ModelRef, settings: Settings) -> _Entry:
        worker = WorkerProcess(
            load_frame(ref, settings),
            log_dir=self._log_dir,
            on_over=self._on_over,
            command=self._command,
            step_timeout=settings.developer.step_timeout,
        )
        task: asyncio.Task[object] = asyncio.create_task(self._load(worker))
        # Read the exception: otherwise asyncio logs it as never retrieved if no caller waits for the load any more.
        task.add_done_callback(lambda task: task.exception())
        entry = self._entries[ref.id] = _Entry(ref, settings, worker, task, self.settings.idle_unload or math.inf)
        if self._idle_task is None:
            self._idle_task = asyncio.create_task(self._unload_idle())
        return entry

    async def _load(self, worker: WorkerProcess) -> None:
        async with self._load_lock:
            if worker.state == "over":  # the model was unloaded while this task waited for the lock
                raise worker.end_error
            ended = self._ended
            self._ended = []
            await asyncio.gather(*(other.wait_gone() for other in ended))
            log.info("loading %s", worker.model)
            info = await worker.start()
        log.info("loaded %s on %s (%s): %s", worker.model, info.backend, info.device, info.reason)
        for warning in info.warnings:
            log.warning("%s: %s", worker.model, warning)

    def _unload_task(self, entry: _Entry, drain: float) -> asyncio.Task[None]:
        """The task that unloads the model of an entry; the first call starts it. New requests wait for this task."""
        if entry.unloading is None:
            log.info("unloading %s", entry.worker.model)
            entry.unloading = asyncio.create_task(self._unload(entry.worker, drain))
        return entry.unloading

    async def _unload(self, worker: WorkerProcess, drain: float) -> None:
        await worker.wait_idle(drain)
        await worker.stop(Stopping(STOPPING if self.stopping else f"{worker.model} was unloaded"))

    def _on_over(self, worker: WorkerProcess) -> None:
        # The entry still has this worker: a worker ends only once, and is not replaced before its end.
        del self._entries[worker.model]
        self._ended.append(worker)
        if worker.expected_end is None and worker.info is not None:
            self.deaths[worker.model] = self.deaths.get(worker.model, 0) + 1

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(min(self.settings.idle_unload / 4 or IDLE_SECONDS, IDLE_SECONDS))
            for entry in list(self._entries.values()):
                if entry.worker.idle > entry.lifetime:
                    self._unload_task(entry, drain=0.0)
