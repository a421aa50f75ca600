"""Writes settings files: under a lock, and atomically."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import StorageFailed

Value = str | int | float | list[str]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of a file: other threads and processes change it too. Raises StorageFailed."""
    lock = file.with_name(f".{file.name}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _failed(file, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace(file: Path, text: str) -> None:
    """Replace the file, which keeps its mode, or create it for this user only. A link stays a link.

    Raises StorageFailed.
    """
    target = file.resolve()
    temporary = target.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.touch(0o600)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.write_text(text, "utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _failed(file, error) from None


def _failed(file: Path, error: OSError) -> StorageFailed:
    hint = f"make {file.parent} writable for this user, or set LOCALLLM_CONFIG to a file that you can write"
    return StorageFailed(f"cannot write {file}: {error}", hint=hint)
