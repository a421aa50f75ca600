"""Which models are loaded: one worker process for each, started at the first request, ended when idle."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...engine.options import LoadOptions
from ...engine.quantization import Quant
from .. import paths
from ..config import Settings
from ..errors import InvalidRequest, ModelNotFound, NoBackend, Overloaded, Stopping
from ..store import catalog
from .admin import LoadedModel
from .frames import Fault, Load, Stats
from .process import COMMAND, Progress, Request, Worker, worker_environment
from .stream import Stream

STOPPING = "the daemon is stopping"
CHECK = (sys.executable, "-P", "-m", "localllm.app.daemon.backend_child")
CHECK_SECONDS = 60.0  # for a backend to look at its machine: a driver that is broken may never answer
STATS_SECONDS = 1.0  # a worker that has not told its figures by then is reported without

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    ref: catalog.ModelRef
    worker: Worker
    loading: asyncio.Task[object]
    leaving: asyncio.Task[None] | None = None  # set once it is being unloaded


class Host:
    """The loaded models. `deaths` counts, by model, the workers that ended without being asked."""

    def __init__(self, settings: Settings, *, command: Sequence[str] = COMMAND, log_dir: Path | None = None) -> None:
        self.settings = settings
        self.stopping = False
        self.deaths: dict[str, int] = {}
        self._command, self._log_dir = command, log_dir or paths.log_dir()
        self._slots: dict[str, _Slot] = {}
        self._over_now: list[Worker] = []  # of these a process may remain, with memory that the next would miss
        self._turn = asyncio.Lock()  # two models that load at once would each count on the same free memory
        self._janitor: asyncio.Task[None] | None = None

    async def worker(
        self,
        name: str,
        *,
        local: bool = False,
        backend: str | None = None,
        quant: Quant | None = None,
        progress: Progress | None = None,
    ) -> Worker:
        """The ready worker of a model, started if need be; all who ask meanwhile wait for the same one.

        `local`: the client is our own, on the unix socket, and may name a folder. Raises ModelNotFound, what the
        worker said when it cannot load, Stopping, or InvalidRequest when the model is busy, loaded in another way.
        """
        ref = await self._resolve(name, local)
        checked = False
        while True:
            self._refuse_when_stopping()
            slot = self._slots.get(ref.id) or self._begin(ref, backend, quant)
            if slot.leaving is not None:
                await asyncio.shield(slot.leaving)
                continue
            if progress is not None:
                slot.worker.listeners.append(progress)
            await asyncio.shield(slot.loading)
            info = slot.worker.info
            other = info is not None and backend not in (None, "auto", info.backend)
            made = slot.worker.load_frame.options.quant
            if backend is not None and other and not checked:
                await check_backend(backend, ref)  # before anything makes way for it
                checked = True
                continue
            if info is not None and (other or quant not in (None, made)):
                if slot.worker.held:
                    how = f"on {info.backend}" if other else f"with quant {made}"
                    raise InvalidRequest(
                        f"{ref.id} is busy {how}; unload it first (localllm stop)",
                        param="backend" if other else "quant",
                    )
                await asyncio.shield(self._leave(slot, drain=0.0))
                continue
            if slot.worker.state == "ready":
                return slot.worker

    def open(self, worker: Worker, requests: Sequence[Request], weight: int = 1) -> Stream:
        """Send requests to a worker; `weight` is how many answers they ask for.

        Raises Overloaded when the worker would hold more than `max_queue` of them, InvalidRequest when these are more.
        """
        self._refuse_when_stopping()
        limit = self.settings.max_queue
        if weight > limit:
            raise InvalidRequest(
                f"a request for {weight} answers exceeds the limit of {limit}",
                hint="to raise the limit, use the setting max_queue",
                param="n",
            )
        if worker.held + weight > limit:
            raise Overloaded(
                f"{worker.model} has {worker.held} unfinished requests; {weight} more exceed the limit of {limit}",
                hint="try again later; to raise the limit, use the setting max_queue",
            )
        return worker.open(requests, weight)

    def only(self) -> str:
        """The one loaded model's id. Raises InvalidRequest when there is not exactly one."""
        if len(self._slots) != 1:
            loaded = ", ".join(self._slots) or "none"
            raise InvalidRequest(
                f"model is missing; it is optional only if exactly one model is loaded ({loaded})", param="model"
            )
        return next(iter(self._slots))

    def find(self, model_id: str) -> Worker | None:
        """The worker of a loaded or loading model."""
        slot = self._slots.get(model_id)
        return slot.worker if slot else None

    async def stats(self) -> list[tuple[Worker, Stats | None]]:
        """Every worker and what it says of itself; None while it loads or does not answer."""
        workers = [slot.worker for slot in self._slots.values()]
        said = await asyncio.gather(*(worker.stats(STATS_SECONDS) for worker in workers))
        return list(zip(workers, said, strict=True))

    async def loaded(self) -> list[LoadedModel]:
        limit = self.settings.idle_unload
        return [
            _describe(worker, stats, limit, _options(worker.load_frame, self.settings))
            for worker, stats in await self.stats()
            if worker.state != "over"
        ]

    async def unload(self, name: str) -> None:
        """End a model's worker, giving its requests `drain` seconds. Raises ModelNotFound when it is not loaded."""
        slot = self._slots.get(name)
        if slot is None:
            loaded = ", ".join(self._slots) or "none"
            raise ModelNotFound(f"model {name!r} is not loaded", hint=f"loaded: {loaded}", param="model")
        await asyncio.shield(self._leave(slot, self.settings.drain))

    async def drain(self, seconds: float) -> None:
        """Take no more requests; returns when none is running, or after so many seconds."""
        self.stopping = True
        await asyncio.gather(*(slot.worker.quiet(seconds) for slot in self._slots.values()))

    async def close(self) -> None:
        """End every worker; requests still running get Stopping."""
        self.stopping = True
        if self._janitor is not None:
            self._janitor.cancel()
        await asyncio.gather(*(self._leave(slot, drain=0.0) for slot in list(self._slots.values())))

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise Stopping(STOPPING)

    async def _resolve(self, name: str, local: bool) -> catalog.ModelRef:
        if not local and catalog.is_path(name):
            raise ModelNotFound("model must be an id, not a path", param="model")
        slot = self._slots.get(name)
        return slot.ref if slot else await asyncio.to_thread(catalog.resolve, name, allow_path=local)

    def _begin(self, ref: catalog.ModelRef, backend: str | None, quant: Quant | None) -> _Slot:
        settings = self.settings
        worker = Worker(
            load_frame(ref, settings, backend, quant),
            log_dir=self._log_dir,
            on_over=self._over,
            command=self._command,
            step_timeout=settings.step_timeout,
        )
        loading: asyncio.Task[object] = asyncio.create_task(self._load(worker))
        loading.add_done_callback(lambda task: task.exception())  # those who wait get it; there may be none left
        slot = self._slots[ref.id] = _Slot(ref, worker, loading)
        if self._janitor is None and settings.idle_unload:
            self._janitor = asyncio.create_task(self._unload_idle())
        return slot

    async def _load(self, worker: Worker) -> None:
        async with self._turn:
            if worker.state == "over":  # unloaded before its turn came
                raise worker.end_error
            over, self._over_now = self._over_now, []
            await asyncio.gather(*(other.gone() for other in over))
            log.info("loading %s", worker.model)
            info = await worker.start()
        log.info("loaded %s on %s (%s): %s", worker.model, info.backend, info.device, info.reason)
        for warning in info.warnings:
            log.warning("%s: %s", worker.model, warning)

    def _leave(self, slot: _Slot, drain: float) -> asyncio.Task[None]:
        """The one task that unloads this slot; requests that come meanwhile wait for it and load anew."""
        if slot.leaving is None:
            log.info("unloading %s", slot.worker.model)
            slot.leaving = asyncio.create_task(self._unload(slot.worker, drain))
        return slot.leaving

    async def _unload(self, worker: Worker, drain: float) -> None:
        await worker.quiet(drain)
        await worker.stop(Stopping(STOPPING if self.stopping else f"{worker.model} was unloaded"))

    def _over(self, worker: Worker) -> None:
        del self._slots[worker.model]  # a worker is over once, and until then no other has its place
        self._over_now.append(worker)
        if worker.expected_end is None and worker.info is not None:
            self.deaths[worker.model] = self.deaths.get(worker.model, 0) + 1

    async def _unload_idle(self) -> None:
        limit = self.settings.idle_unload
        while True:
            await asyncio.sleep(min(limit / 4, 5.0))
            for slot in list(self._slots.values()):
                if slot.worker.idle > limit:
                    self._leave(slot, drain=0.0)


async def check_backend(backend: str, ref: catalog.ModelRef) -> None:
    """Raises what a worker would say that is to run this model on a backend that cannot, and NoBackend where even
    looking at the machine ends badly or not at all."""
    process = await asyncio.create_subprocess_exec(
        *CHECK,
        backend,
        ref.id,
        str(ref.path),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=worker_environment(),
        process_group=0,
    )
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        raise NoBackend(f"cannot probe backend {backend}: no result within {CHECK_SECONDS:g} s") from None
    finally:
        if process.returncode is None:  # it hangs, or who asked is gone
            process.kill()
            with suppress(TimeoutError):  # a driver may keep it from dying
                async with asyncio.timeout(1.0):
                    await process.communicate()
    if said:
        raise msgspec.json.decode(said, type=Fault).error()
    if process.returncode:
        raise NoBackend(f"cannot probe backend {backend}: the probe process exited with status {process.returncode}")


def load_frame(ref: catalog.ModelRef, settings: Settings, backend: str | None, quant: Quant | None) -> Load:
    """The frame that makes a worker load this model; backend and quant of a request precede those of the settings."""
    options = load_options(settings, ref.path, quant or settings.quant)
    return Load(model=ref.id, path=str(ref.path), backend=backend or settings.backend, options=options)


def load_options(settings: Settings, model: Path, quant: Quant) -> LoadOptions:
    """The settings as a runner takes them: 0 in the settings means automatic."""
    return LoadOptions(
        context=settings.context or None,
        cache_bytes=settings.cache_mib * 2**20 or None,
        cache_share=settings.cache_share or None,
        max_rows=settings.max_rows,
        dtype=settings.dtype,
        cache_dtype=settings.cache_dtype,
        quant=quant,
        packed_dir=paths.packed_dir(model),
        graphs=settings.graphs,
        compiler=settings.developer.compiler,
        compiled_dir=paths.compiled_dir(),
        threads=settings.threads or None,
        reference_ops=settings.developer.reference_ops,
        attention=settings.developer.attention,
        self_test_dir=paths.self_test_dir() if settings.developer.self_test == "on" else None,
    )


def _options(load: Load, settings: Settings) -> tuple[str, ...]:
    """Options of the call that loaded the model, where they differ from the settings."""
    options = (("--backend", load.backend, settings.backend), ("--quant", load.options.quant, settings.quant))
    return tuple(f"{flag} {value}" for flag, value, usual in options if value != usual)


def _describe(worker: Worker, stats: Stats | None, idle_limit: float, options: tuple[str, ...]) -> LoadedModel:
    info = worker.info
    if info is None:
        return LoadedModel(id=worker.model, state="loading", pid=worker.pid, options=options)
    return LoadedModel(
        id=worker.model,
        state="ready",
        pid=worker.pid,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quant=info.quant,
        context=info.context,
        memory=info.weight_bytes + info.cache_bytes,
        token_bytes=info.token_bytes,
        cache_tokens=info.cache_tokens,
        cache_used=stats.cache_used if stats else 0,
        requests=worker.held,
        idle=worker.idle,
        unload_in=max(idle_limit - worker.idle, 0.0) if idle_limit and not worker.held else None,
        warnings=info.warnings,
        options=options,
    )
