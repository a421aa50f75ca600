"""One connection of a transfer: it takes tasks from the work list until the transfer ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from httpx import URL

from .chunks import Lease
from .failures import Changed, Interrupted, Refused, Transient, WithoutRanges, wait_before
from .http import Connection, Credentials, Reply
from .limiter import Limiter
from .partial import PartialFile, store_small
from .worklist import Assignment, Job, WorkList

PROGRESS_BYTES = 65536  # a connection with fewer bytes made no progress


class Worker:
    """Runs in one thread. `connection.interrupt` ends its request."""

    def __init__(self, work: WorkList, limiter: Limiter, credentials: Credentials, targets: dict[str, URL]) -> None:
        self.connection = Connection(work.policy, credentials, targets)
        self._work = work
        self._limiter = limiter
        self._received = 0  # bytes of the current task since its last failure
        self.request_started = 0.0  # 0: no request waits for its headers

    def run(self) -> None:
        try:
            while task := self._work.next():
                self.connection.restart()
                self._run_task(task)
        except Exception as error:
            self._work.fail(error)
        finally:
            self.connection.close()

    def _run_task(self, task: Assignment) -> None:
        success = False
        try:
            if task.lease is None:
                self._retry(task.job, lambda url: self._download_small(task.job, url))
            else:
                lease = task.lease
                self._retry(task.job, lambda url: self._download_lease(task.job, lease, url))
            success = True
        except Interrupted:
            pass
        finally:
            self._work.finish(task, success=success)

    def _retry(self, job: Job, download: Callable[[str], None]) -> None:
        """Call `download` with the file's address until it returns. Raises DownloadFailed or Interrupted."""
        failures = 0
        while True:
            self._work.check(job)
            url = job.url
            self._received = 0
            try:
                return download(url)
            except Transient as failure:
                self._work.check(job)
                failures = 1 if self._received >= PROGRESS_BYTES else failures + 1
                self._work.slow_down(failure)
                if failures >= self._work.policy.attempts:
                    self._work.next_address(job, url, str(failure))
                    failures = 0
                else:
                    self._work.sleep(job, wait_before(failures + 1, failure, self._work.policy))
            except Refused as failure:
                self._work.next_address(job, url, str(failure), _hint(failure.status))
                failures = 0
            except Changed as failure:
                self._work.next_address(job, url, f"the file has changed: {failure}")
            finally:
                self.request_started = 0.0

    def _download_small(self, job: Job, url: str) -> None:
        content = bytearray()
        self._work.meter.reset(job.file.name)
        with self._reply(job, url, 0, job.file.size) as reply:
            for block in self._blocks(job, reply):
                content += block
                self._work.meter.arrive(job.file.name, len(block))
                if len(content) > job.file.size:
                    break
        if len(content) != job.file.size:
            raise Transient(f"{job.file.name} has {len(content)} bytes instead of {job.file.size}")
        name = store_small(self._work.disk, self._work.blobs, job.file, bytes(content))
        if name is None:
            self._work.wrong_content(job, "its hash is not the hub's")
            raise Transient("wrong hash")
        self._work.store(job, name)

    def _download_lease(self, job: Job, lease: Lease, url: str) -> None:
        """Download the rest of a lease. A repetition continues behind the last byte."""
        chunks = self._partial(job).chunks
        start = lease.next * chunks.chunk_bytes + lease.offset
        end = min(lease.end * chunks.chunk_bytes, chunks.size)
        try:
            with self._reply(job, url, start, end) as reply:
                self._write(job, lease, reply, start)
        except WithoutRanges as failure:
            with self._work.changed:
                chunks.single = True
            raise Interrupted from failure  # the lease ends; the next one has the file to its end
        if lease.next < lease.end:
            raise Transient(f"{job.file.name} ended too early")

    def _write(self, job: Job, lease: Lease, reply: Reply, start: int) -> None:
        """Write a reply to the file until the lease ends. Another lease may have taken its second half."""
        partial = self._partial(job)
        skip = start - reply.start
        for block in self._blocks(job, reply):
            rest = memoryview(block)[skip:]
            skip = max(0, skip - len(block))
            while rest:
                count = partial.chunks.length(lease.next) - lease.offset
                part, rest = rest[:count], rest[count:]
                is_complete = partial.write(lease, part) is not None
                self._work.meter.arrive(job.file.name, len(part))
                if is_complete and not self._work.complete_chunk(job, lease):
                    return

    @contextlib.contextmanager
    def _reply(self, job: Job, url: str, start: int, end: int) -> Iterator[Reply]:
        """The checked reply to a request for a range of the file."""
        size = job.file.size
        skip = job.partial is not None and job.partial.chunks.single
        self.request_started = time.monotonic()
        reply = self.connection.open_range(url, start, end, size, skip=skip)
        self.request_started = 0.0
        try:
            if job.file.etag and reply.etag != job.file.etag:
                raise Changed(f"its ETag is {reply.etag[:80]} instead of {job.file.etag[:80]}")
            yield reply
        finally:
            reply.close()

    def _blocks(self, job: Job, reply: Reply) -> Iterator[bytes]:
        """The blocks of a reply. Raises Transient for a connection below the minimum speed, or Interrupted."""
        policy = self._work.policy
        began, count = time.monotonic(), 0
        try:
            for block in reply.blocks():
                if wait := self._limiter.delay(len(block)):
                    self._work.sleep(job, wait)
                    began += wait
                self._work.check(job)
                yield block
                self._received += len(block)
                count += len(block)
                now = time.monotonic()
                if now - began > policy.stall_timeout:
                    if count < policy.minimum_speed * (now - began):
                        raise Transient(f"the connection is too slow: {count} bytes in {now - began:.0f} s")
                    began, count = now, 0
        except Transient:
            if self.connection.interrupted:
                raise Interrupted from None
            raise

    def _partial(self, job: Job) -> PartialFile:
        assert job.partial is not None
        return job.partial


def _hint(status: int) -> str:
    if status in (401, 403):
        return "request access on the model's page, then set HF_TOKEN to a token of your account"
    return "try again later; completed files are kept"
