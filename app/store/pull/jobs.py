"""Downloads in the background of the daemon: each has a thread, and goes on when its client has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from ...errors import AppError, DownloadFailed, InvalidRequest, ModelNotFound, Overloaded
from ..local.refs import ModelRef
from ..transfer.progress import Progress
from ..transfer.transfer import Cancelled
from .download import Download
from .plan import Plan

State = Literal["planning", "waiting", "downloading", "paused", "done", "failed", "cancelled"]
ENDED = ("done", "failed", "cancelled")
MAX_UNFINISHED = 32  # each has threads and connections
MAX_ENDED = 200  # that a client can still see

log = logging.getLogger(__name__)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one download. `name` is the name that the client asked for, and identifies the download."""

    name: str
    state: State = "planning"
    received: int = 0  # bytes, with those of earlier attempts
    total: int = 0  # bytes; 0: not known yet
    files_complete: int = 0
    files_total: int = 0
    speed: float = 0.0  # bytes per second
    eta: float | None = None  # seconds to the end; None: unknown
    warning: str = ""  # about files without a hash
    model: str = ""  # id of the complete model or adapter
    error: str = ""
    hint: str = ""


class Runnable(Protocol):
    """The part of Download that a job uses."""

    def plan(self) -> Plan: ...
    def run(self, plan: Plan) -> ModelRef: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def cancel(self) -> None: ...


Open = Callable[[str, Callable[[Progress], None]], Runnable]


def _open(name: str, notify: Callable[[Progress], None]) -> Runnable:
    return Download(name, notify=notify)


class Jobs:
    """The downloads of the daemon, by name. Methods may be called by any thread."""

    def __init__(self, open: Open = _open) -> None:
        self._open = open
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._downloads: dict[str, Runnable] = {}

    def list(self) -> list[Job]:
        """The downloads since the daemon started, in the order in which they were started."""
        with self._lock:
            return list(self._jobs.values())

    def start(self, name: str) -> Job:
        """Start a download. A download that runs already is returned; one that has ended is started again.

        Raises InvalidRequest or ModelNotFound for a name that cannot be downloaded, Overloaded for one too many.
        """
        download = self._open(name, lambda progress: self._update(name, progress))
        with self._lock:
            running = self._jobs.get(name)
            if running is not None and running.state not in ENDED:
                return running
            self._refuse_too_many()
            self._forget_oldest()
            job = self._jobs[name] = Job(name=name)
            self._downloads[name] = download
        threading.Thread(target=self._run, args=(name, download), name=f"download {name}", daemon=True).start()
        return job

    def _refuse_too_many(self) -> None:
        unfinished = sum(job.state not in ENDED for job in self._jobs.values())
        if unfinished >= MAX_UNFINISHED:
            raise Overloaded(f"{unfinished} downloads have not ended", hint="wait for one of them, or cancel it")

    def _forget_oldest(self) -> None:
        """Forget the downloads that ended first, beyond MAX_ENDED."""
        ended = [name for name, job in self._jobs.items() if job.state in ENDED]
        for name in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self._jobs[name]
            del self._downloads[name]

    def pause(self, name: str) -> Job:
        """Raises ModelNotFound for an unknown download, InvalidRequest for one that has ended."""
        self._running(name).pause()
        return self._change(name, state="paused", speed=0.0, eta=None)

    def resume(self, name: str) -> Job:
        """Raises ModelNotFound for an unknown download, InvalidRequest for one that has ended."""
        self._running(name).resume()
        return self._change(name, state="downloading")

    def cancel(self, name: str) -> Job:
        """Stop a download. The received data stays on the disk: another download of the same name continues it.

        Raises ModelNotFound for an unknown download, InvalidRequest for one that has ended.
        """
        self._running(name).cancel()
        return self._change(name)

    def _running(self, name: str) -> Runnable:
        with self._lock:
            job = self._jobs.get(name)
            if job is None:
                raise ModelNotFound(f"there is no download of {name[:200]!r}", param="name")
            if job.state in ENDED:
                raise InvalidRequest(f"the download of {name} has ended: {job.state}", param="name")
            return self._downloads[name]

    def _run(self, name: str, download: Runnable) -> None:
        try:
            plan = download.plan()
            self._change(name, total=plan.missing_bytes, files_total=len(plan.missing), warning=plan.warning)
            model = download.run(plan)
            self._change(name, state="done", speed=0.0, eta=None, model=model.id)
        except Cancelled:
            self._change(name, state="cancelled", speed=0.0, eta=None)
        except AppError as error:
            self._fail(name, error)
        except Exception:  # a download must not end without a state that its clients see
            log.exception("download of %s", name)
            self._fail(name, DownloadFailed("the download failed unexpectedly", hint="see the log of the daemon"))

    def _fail(self, name: str, error: AppError) -> None:
        log.warning("download of %s: %s", name, error.message)
        self._change(name, state="failed", speed=0.0, eta=None, error=error.message, hint=error.hint)

    def _update(self, name: str, progress: Progress) -> None:
        self._change(
            name,
            state=progress.state,
            received=progress.received,
            total=progress.total,
            files_complete=progress.files_complete,
            files_total=progress.files_total,
            speed=progress.speed,
            eta=progress.eta,
        )

    def _change(self, name: str, **fields: object) -> Job:
        """Change the fields of a download. The end of a download is final."""
        with self._lock:
            forgotten = Job(name=name, state="done")  # a late report of a thread
            job = self._jobs.get(name, forgotten)
            if job.state not in ENDED:
                job = self._jobs[name] = msgspec.structs.replace(job, **fields)
            return job
