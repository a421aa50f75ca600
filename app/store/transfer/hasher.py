"""The threads behind the workers: some hash and publish large files, one syncs all files and publishes small ones."""

from __future__ import annotations

import time
from collections.abc import Callable

from .partial import publish_small
from .worklist import Job, WorkList

BLOCK_BYTES = 2**18


def hash_files(work: WorkList) -> None:
    """Hash the prefix of each large file as it grows, and publish complete files, until the transfer ends.

    Several threads may call this function: each file has one of them at a time.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    _run(work, lambda: _hash_files(work, buffer))


def sync_files(work: WorkList) -> None:
    """Sync received data every few seconds, and publish small files, until the transfer ends."""
    _run(work, lambda: _sync_files(work))


def sync(work: WorkList) -> None:
    """Write all received data to the disk, so that a power cut loses only what arrives later."""
    with work.changed:
        files = [job.partial for job in work.large if job.partial is not None]
    for file in files:
        file.sync()


def _run(work: WorkList, body: Callable[[], None]) -> None:
    try:
        body()
    except Exception as error:
        work.fail(error)


def _hash_files(work: WorkList, buffer: memoryview) -> None:
    while job := work.next_to_hash():
        try:
            _advance(work, job, buffer)
        finally:
            work.finish_hashing(job)


def _sync_files(work: WorkList) -> None:
    synced = time.monotonic()
    while not work.stopped:
        if work.wait_for_batch(synced + work.policy.sync_interval - time.monotonic()):
            _publish_small(work)
        elif work.ended:
            return
        if time.monotonic() - synced > work.policy.sync_interval:
            sync(work)
            synced = time.monotonic()


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
