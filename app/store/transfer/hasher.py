"""The thread that hashes large files, and syncs and publishes all files."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ...errors import AppError
from .partial import publish_small
from .worklist import Job, WorkList

BLOCK_BYTES = 2**18


def hash_files(work: WorkList) -> None:
    """Hash the prefix of each large file as it grows, and publish complete files, until the transfer ends."""
    synced = time.monotonic()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        while step := _wait_for_step(work, buffer):
            step()
            if time.monotonic() - synced > work.policy.sync_interval:
                sync(work)
                synced = time.monotonic()
    except (AppError, OSError) as error:
        work.fail(error)


def sync(work: WorkList) -> None:
    """Write all received data to the disk, so that a power cut loses only what arrives later."""
    with work.changed:
        files = [job.partial for job in work.large if job.partial is not None]
    for file in files:
        file.sync()


def _wait_for_step(work: WorkList, buffer: memoryview) -> Callable[[], None] | None:
    """The next step: publish small files, or advance a large file. None: the transfer has ended."""
    with work.changed:
        while not (work.cancelled or work.failure is not None):
            if work.has_batch:
                return lambda: _publish_small(work)
            if job := _next_job(work):
                return partial(_advance, work, job, buffer)
            if work.ended:
                return None
            work.changed.wait()
        return None


def _next_job(work: WorkList) -> Job | None:
    """The first large file with a chunk to hash, or to reset or publish."""
    for job in work.large:
        assert job.partial is not None
        if job.restarting:
            if not job.partial.chunks.leased:
                return job
        elif job.partial.can_hash or job.partial.is_hashed:
            return job
    return None


def _publish_small(work: WorkList) -> None:
    with work.changed:
        stored = list(work.stored)
    publish_small(work.disk, work.blobs, [(job.file, name) for job, name in stored])
    for job, name in stored:
        work.publish(job, name)


def _advance(work: WorkList, job: Job, buffer: memoryview) -> None:
    """Do one step of a file: reset it, hash one chunk, or publish it."""
    file = job.partial
    assert file is not None
    if job.restarting:
        file.reset()
        with work.changed:
            job.restarting = False
            work.changed.notify_all()
    elif file.is_hashed:
        name = file.publish()
        if name is None:
            work.wrong_content(job, "its hash is not the hub's")
        else:
            work.publish(job, name)
    else:
        _hash_chunk(work, job, buffer)


def _hash_chunk(work: WorkList, job: Job, buffer: memoryview) -> None:
    file = job.partial
    assert file is not None
    index = file.hashed
    if file.hash_next(buffer):
        return
    with work.changed:
        file.chunks.invalidate(index)
        work.meter.lose(job.file.name, file.chunks.length(index))
        work.changed.notify_all()
