"""One transfer for each repository: other processes wait for it, and continue it if it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .disk import Disk

POLL_SECONDS = 0.2
NAME = "localllm.lock"


def lock_file(folder: Path) -> Path:
    """The lock of a repository folder, where huggingface_hub has its locks."""
    return folder.parent / ".locks" / folder.name / NAME


@contextmanager
def locked(folder: Path, disk: Disk, while_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a repository. `while_waiting` is called while another process holds it; it may raise.

    The system releases the lock of a process that dies.
    """
    file = lock_file(folder)
    disk.make_folder(file.parent)
    descriptor = disk.open(file)
    try:
        while not _try_lock(descriptor):
            while_waiting()
            time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unless_locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a repository, so that no transfer begins. False: a process transfers files of it now.

    True without the lock if no lock file can be created: the file system is read-only.
    """
    file = lock_file(folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield True
        return
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """True if a process transfers files of this repository now."""
    try:
        descriptor = os.open(lock_file(folder), os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
