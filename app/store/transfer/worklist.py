"""The work that is left, shared by all threads of a transfer.

    next()  ── small file ──► worker ── request ── memory ── blob
            ── lease ───────► worker ── request ── partial file ──► hashers ── blob

Every field is protected by `changed`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import DownloadFailed
from ..remote import RemoteFile
from .chunks import Lease
from .disk import Disk
from .failures import Interrupted, Transient
from .partial import PartialFile
from .policy import Policy
from .progress import Meter

SMALL_BATCH = 512  # small files with one sync
RETRY_HINT = "check the network and the proxy settings; then run the command again to continue"


@dataclass(slots=True, eq=False)
class Job:
    """A file in transfer. `partial` is None for a small file, which one request downloads."""

    file: RemoteFile
    partial: PartialFile | None = None
    address: int = 0  # index of the current address: the hub, then its mirrors
    reason: str = ""  # why the first address failed
    hint: str = ""
    content_failures: int = 0  # downloads with a wrong hash
    restarting: bool = False  # all data is wrong; a hasher resets the file when no lease is left
    hashing: bool = False  # a hasher works on the file
    addresses: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = [self.file.url, *self.file.mirrors]

    @property
    def url(self) -> str:
        return self.addresses[self.address]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The next task of a worker: a small file, or a lease of a large file."""

    job: Job
    lease: Lease | None


class WorkList:
    """Unfinished files, the number of active workers, and the state of the transfer."""

    def __init__(self, blobs: Path, policy: Policy, disk: Disk, meter: Meter) -> None:
        self.blobs = blobs
        self.policy = policy
        self.disk = disk
        self.meter = meter
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self.paused = False
        self.cancelled = False
        self.abandoned = False  # a thread still runs after the end of the transfer
        self.large: list[Job] = []  # not yet published, in order
        self.blob_names: dict[str, str] = {}  # key → name of the complete blob
        self.stored: list[tuple[Job, str]] = []  # small files that are written but not yet synced, and their names
        self._small: deque[Job] = deque()
        self._small_active = 0
        self._waits_for_hash = False  # a worker waits because hashers are far behind
        self._active = 0
        self._limit = float(policy.first_connections)

    def add(self, jobs: Sequence[Job]) -> None:
        with self.changed:
            self._small.extend(job for job in jobs if job.partial is None)
            self.large.extend(job for job in jobs if job.partial is not None)
            self.changed.notify_all()

    def count_tasks(self) -> int:
        """An upper limit of the tasks that can run at the same time."""
        with self.changed:
            chunks = sum(job.partial.chunks.count for job in self.large if job.partial is not None)
            return len(self._small) + chunks

    @property
    def ended(self) -> bool:
        """True if no worker may start another task."""
        return self.stopped or self._is_finished

    @property
    def _is_finished(self) -> bool:
        return not (self._small or self.large or self.stored or self._active)

    @property
    def stopped(self) -> bool:
        """True if the transfer was cancelled or has failed."""
        return self.cancelled or self.failure is not None

    def next(self) -> Assignment | None:
        """Wait for the next task of a worker. None: the transfer has ended."""
        with self.changed:
            while not self.ended:
                if not self.paused and self._active < int(self._limit) and (task := self._take()):
                    self._active += 1
                    self._small_active += task.lease is None
                    return task
                self.changed.wait()
            return None

    def next_to_hash(self) -> Job | None:
        """Wait for a large file with a chunk to hash, or to reset or publish. None: the transfer has ended.

        The caller ends its step with `finish_hashing`.
        """
        with self.changed:
            while not self.ended:
                for job in self.large:
                    if not job.hashing and _has_step(job):
                        job.hashing = True
                        return job
                self.changed.wait()
            return None

    def finish_hashing(self, job: Job) -> None:
        with self.changed:
            job.hashing = False
            if self._waits_for_hash and self._unhashed <= self.policy.unhashed_bytes:
                self._waits_for_hash = False
                self.changed.notify_all()

    def wait_for_batch(self, seconds: float) -> bool:
        """Wait until a batch of small files is stored. Returns False after some seconds, or if the transfer ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_batch or self.ended, max(0.0, seconds))
            return self.has_batch and not self.stopped

    def finish(self, task: Assignment, *, success: bool) -> None:
        """End a task. A task that neither succeeded nor failed for good goes back to the list."""
        with self.changed:
            self._active -= 1
            self._small_active -= task.lease is None
            if task.lease is not None:
                assert task.job.partial is not None
                task.job.partial.chunks.give_back(task.lease)
                self.meter.lose(task.job.file.name, task.lease.offset)
            elif not success:
                self._small.appendleft(task.job)
            if success:
                self._limit = min(self._limit + 1.0, float(self.policy.connections))
            self.changed.notify_all()

    def complete_chunk(self, job: Job, lease: Lease) -> bool:
        """A lease has written its chunk `next`. Returns True if the lease continues."""
        assert job.partial is not None
        with self.changed:
            if job.partial.chunks.finish(lease) == job.partial.hashed:
                self.changed.notify_all()  # a hasher that is at work looks again by itself
            return lease.next < lease.end

    def fail(self, error: Exception) -> None:
        """End the transfer. The first error counts."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def check(self, job: Job) -> None:
        """Raises Interrupted if a worker must leave its task."""
        if self.paused or self.cancelled or self.failure is not None or job.restarting:
            raise Interrupted

    def sleep(self, job: Job, seconds: float) -> None:
        """Wait. Raises Interrupted as `check` does."""
        end = time.monotonic() + seconds
        with self.changed:
            while (rest := end - time.monotonic()) > 0:
                self.check(job)
                self.changed.wait(rest)
        self.check(job)

    def slow_down(self, failure: Transient) -> None:
        """Use fewer connections after a failure, and half of them for an overloaded server."""
        with self.changed:
            self._limit = max(1.0, self._limit / 2 if failure.overloaded else self._limit - 1)

    def next_address(self, job: Job, url: str, reason: str, hint: str = RETRY_HINT) -> None:
        """Continue at the next address of a file. Raises DownloadFailed with the first reason if none is left."""
        with self.changed:
            if job.url != url:
                return  # another worker has already changed the address
            if not job.reason:
                job.reason, job.hint = reason, hint
            if job.address + 1 == len(job.addresses):
                raise DownloadFailed(f"cannot download {job.file.name}: {job.reason}", hint=job.hint)
            job.address += 1

    def wrong_content(self, job: Job, reason: str) -> None:
        """Download a file again because its content is wrong; the next mirror comes first.

        Raises DownloadFailed after a few downloads.
        """
        with self.changed:
            job.content_failures += 1
            job.restarting = job.partial is not None
            if job.content_failures >= self.policy.content_attempts:
                raise DownloadFailed(
                    f"{job.file.name} arrived {job.content_failures} times with wrong content: {reason}",
                    hint="a server or a proxy changes the file: try again later, or set HF_ENDPOINT",
                )
            job.address = (job.address + 1) % len(job.addresses)
            self.meter.reset(job.file.name)
            self.changed.notify_all()

    def store(self, job: Job, name: str) -> None:
        """A small file is verified and written. `hasher.sync_files` publishes it."""
        with self.changed:
            self.stored.append((job, name))
            self.changed.notify_all()

    @property
    def has_batch(self) -> bool:
        """True if the stored small files are as many as one sync should have, or the last ones."""
        is_last = not (self._small or self._small_active)
        return len(self.stored) >= SMALL_BATCH or (is_last and bool(self.stored))

    def publish(self, job: Job, name: str) -> None:
        """A file is complete, verified and has its final name `name`."""
        with self.changed:
            if job in self.large:
                self.large.remove(job)
            if (job, name) in self.stored[:1]:
                del self.stored[0]
            self.meter.finish(job.file.name)
            self.blob_names[job.file.key] = name
            self.changed.notify_all()

    @property
    def _unhashed(self) -> int:
        return sum(job.partial.unhashed for job in self.large if job.partial is not None and not job.restarting)

    def _take(self) -> Assignment | None:
        if self._small:
            return Assignment(self._small.popleft(), None)
        if self._unhashed > self.policy.unhashed_bytes:
            self._waits_for_hash = True
            return None
        for job in self.large:
            assert job.partial is not None
            shares = (
                2 * self.policy.connections if job is self.large[-1] else 1
            )  # its hash ends soon after its download
            if not job.restarting and (lease := job.partial.chunks.take(shares)):
                return Assignment(job, lease)
        return None


def _has_step(job: Job) -> bool:
    """True if a hasher can hash a chunk of a large file, or reset or publish it."""
    file = job.partial
    assert file is not None
    if job.restarting:
        return not file.chunks.leased
    return file.can_hash or file.is_hashed
