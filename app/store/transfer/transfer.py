"""A transfer: threads that download files into the blobs folder of one repository.

    caller: fetch() ── waits, sends progress, watches for slow replies
    workers (up to Policy.connections): requests and writes
    hashers (up to Policy.hashers): hash and publish large files
    one thread: syncs received data, publishes small files

`pause`, `resume` and `cancel` may be called by any thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from httpx import URL

from ...errors import AppError, DownloadFailed
from ..remote import RemoteFile
from . import hasher
from .disk import Disk
from .http import Credentials
from .limiter import Limiter
from .partial import PartialFile, remove_leftovers
from .policy import Policy
from .progress import Meter, Progress, State
from .worker import Worker
from .worklist import Job, WorkList

EXIT_SECONDS = 2.0  # a thread that connects cannot be interrupted; it ends later, and writes nothing


class Cancelled(AppError, exit_code=130, status=499, code="cancelled"):
    """The download was cancelled. What has arrived stays on the disk, and another pull continues it."""


def is_stored(blobs: Path, file: RemoteFile) -> bool:
    """True if the folder has the complete blob of a file with a hash: no transfer downloads it. Reads only its size."""
    if not file.has_hash:
        return False
    blob = blobs / file.key
    return blob.is_file() and blob.stat().st_size == file.size


class Transfer:
    """Downloads files of one repository. `notify` is called by the thread of `fetch`, a few times per second."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[RemoteFile],
        *,
        policy: Policy,
        credentials: Credentials,
        notify: Callable[[Progress], None] = lambda progress: None,
        disk: Disk | None = None,
        revision: str = "",
    ) -> None:
        self._blobs = folder / "blobs"
        self._policy = policy
        self._credentials = credentials
        self._notify = notify
        self._disk = disk or Disk()
        self._revision = revision
        self._limiter = Limiter(policy.bandwidth)
        self._unpaused = threading.Event()
        self._unpaused.set()
        self._cancelled = False
        self._work: WorkList | None = None
        self._workers: list[Worker] = []
        self._meter = Meter(files)
        self._stored: dict[str, str] = {}  # key → name of the complete blob
        self.blob_names: dict[str, str] = {}  # file name → name of its complete blob

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Download the files that are not complete. Every complete file is verified.

        Raises DownloadFailed, Cancelled or OSError (of the disk). Received data stays on the disk.
        """
        self._disk.make_folder(self._blobs)
        missing = [file for file in files if not self._adopt(file)]
        unique = {file.key: file for file in missing}
        if unique:
            self._download(list(unique.values()))
        for file in missing:
            self.blob_names[file.name] = self._stored[file.key]
            self._meter.finish(file.name)

    def pause(self) -> None:
        """Close all connections, and wait for `resume`."""
        self._unpaused.clear()
        self._interrupt()

    def resume(self) -> None:
        self._unpaused.set()
        if work := self._work:
            with work.changed:
                work.paused = False
                work.changed.notify_all()

    def cancel(self) -> None:
        """End `fetch` with Cancelled."""
        self._cancelled = True
        self._interrupt()

    def progress(self) -> Progress:
        return self._meter.read(self._state())

    def _adopt(self, file: RemoteFile) -> bool:
        """True if the file is complete in the cache. Its size is checked; `localllm verify` checks its hash."""
        if not is_stored(self._blobs, file):
            return False
        remove_leftovers(self._disk, self._blobs, file)
        self.blob_names[file.name] = file.key
        self._meter.finish(file.name)
        return True

    def _download(self, files: Sequence[RemoteFile]) -> None:
        work = WorkList(self._blobs, self._policy, self._disk, self._meter)
        jobs: list[Job] = []
        try:
            for file in files:
                jobs.append(self._job(file))
            work.add(jobs)
            self._run(work)
        finally:
            self._stored.update(work.blob_names)
            if not work.abandoned:  # a thread that still runs would write to a descriptor of another file
                _close(jobs)

    def _job(self, file: RemoteFile) -> Job:
        if file.size <= self._policy.chunk_bytes:
            return Job(file)
        partial = PartialFile(self._disk, self._blobs, file, self._policy, self._revision)
        partial.prepare()
        self._meter.restore(file.name, partial.restored)
        return Job(file, partial)

    def _run(self, work: WorkList) -> None:
        """Run the threads until all files are complete. Raises the error that ended them."""
        self._work = work
        targets: dict[str, URL] = {}
        count = max(1, min(self._policy.connections, work.count_tasks()))
        self._workers = [Worker(work, self._limiter, self._credentials, targets) for _ in range(count)]
        bodies: list[Callable[[], None]] = [worker.run for worker in self._workers]
        bodies += [lambda: hasher.hash_files(work)] * min(self._policy.hashers, len(work.large))
        bodies.append(lambda: hasher.sync_files(work))
        threads = [threading.Thread(target=body, daemon=True) for body in bodies]
        threads[-1].name = "sync"
        for thread in threads:
            thread.start()
        try:
            self._watch(work, threads)
        finally:
            if any(thread.is_alive() for thread in threads):
                self._stop(work, threads)
            self._work = None
        if work.failure is not None:
            raise work.failure
        if self._cancelled:
            raise Cancelled("the download was cancelled", hint="run the command again to continue")
        if work.large or work.stored:
            raise DownloadFailed("the download ended early")

    def _watch(self, work: WorkList, threads: Sequence[threading.Thread]) -> None:
        while any(thread.is_alive() for thread in threads):
            self._notify(self.progress())
            with work.changed:
                if self._cancelled:
                    work.cancelled = True
                if not self._unpaused.is_set():
                    work.paused = True
                if work.cancelled or work.paused:
                    work.changed.notify_all()
                if work.failure is not None or work.cancelled:
                    return
            self._expire_slow_replies()
            next((thread for thread in threads if thread.is_alive()), threads[0]).join(self._policy.tick)
        self._notify(self.progress())

    def _stop(self, work: WorkList, threads: Sequence[threading.Thread]) -> None:
        with work.changed:
            work.cancelled = True
            work.changed.notify_all()
        self._interrupt()
        end = time.monotonic() + EXIT_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        work.abandoned = any(thread.is_alive() for thread in threads)
        with contextlib.suppress(OSError):
            hasher.sync(work)

    def _interrupt(self) -> None:
        if work := self._work:
            with work.changed:
                work.paused = work.paused or not self._unpaused.is_set()
                work.cancelled = work.cancelled or self._cancelled
                work.changed.notify_all()
        for worker in self._workers:
            worker.connection.interrupt()

    def _expire_slow_replies(self) -> None:
        limit = time.monotonic() - self._policy.stall_timeout - self._policy.connect_timeout
        for worker in self._workers:
            if 0 < worker.request_started < limit:
                worker.connection.expire()

    def _state(self) -> State:
        if not self._unpaused.is_set():
            return "paused"
        return "downloading"


def _close(jobs: Sequence[Job]) -> None:
    """Close partial files. A file with a wrong hash after all attempts is deleted."""
    for job in jobs:
        if job.partial is None:
            continue
        job.partial.close()
        if job.restarting:
            job.partial.remove()
