"""The thread that hashes, syncs and publishes large files."""

from __future__ import annotations

import time

from ...errors import AppError
from .worklist import Job, WorkList


def hash_files(work: WorkList) -> None:
    """Hash the prefix of each large file as it grows, and publish complete files, until the transfer ends."""
    synced = time.monotonic()
    try:
        while job := _wait_for_job(work):
            _advance(work, job)
            if time.monotonic() - synced > work.policy.sync_interval:
                sync(work)
                synced = time.monotonic()
    except (AppError, OSError) as error:
        work.fail(error)


def sync(work: WorkList) -> None:
    """Write all received data to the disk, so that a power cut loses only what arrives later."""
    with work.changed:
        partials = [job.partial for job in work.large if job.partial is not None]
    for partial in partials:
        partial.sync()


def _wait_for_job(work: WorkList) -> Job | None:
    """The next file with a chunk to hash, or to reset. None: the transfer has ended."""
    with work.changed:
        while not (work.cancelled or work.failure is not None):
            for job in work.large:
                assert job.partial is not None
                if job.restarting:
                    if not job.partial.chunks.leased:
                        return job
                elif job.partial.can_hash or job.partial.is_hashed:
                    return job
            if work.ended:
                return None
            work.changed.wait()
        return None


def _advance(work: WorkList, job: Job) -> None:
    """Do one step of a file: reset it, hash one chunk, or publish it."""
    partial = job.partial
    assert partial is not None
    if job.restarting:
        partial.reset()
        with work.changed:
            job.restarting = False
            work.changed.notify_all()
    elif partial.is_hashed:
        name = partial.publish()
        if name is None:
            work.wrong_content(job, "its hash is not the hub's")
        else:
            work.publish(job, name)
    else:
        _hash_chunk(work, job)


def _hash_chunk(work: WorkList, job: Job) -> None:
    partial = job.partial
    assert partial is not None
    index = partial.hashed
    if partial.hash_next():
        return
    with work.changed:
        partial.chunks.invalidate(index)
        work.meter.lose(job.file.name, partial.chunks.length(index))
        work.changed.notify_all()
