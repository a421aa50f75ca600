"""Errors of the disk, as errors of the app, and the check of its free space before a long write."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import paths
from ..errors import StorageFailed
from ..sizes import size
from .transfer.policy import HEADROOM


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Turn an OSError of the model cache into StorageFailed.

    A closed pipe is none: progress goes to a program that has ended.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _storage_failed(error) from error


def check_space(needed: int, task: str, hint: str) -> None:
    """Raises StorageFailed if the disk of the cache has less than `needed` bytes and a reserve.

    `task`: what needs the space, such as "the download".
    """
    folder = paths.hub_cache_dir()
    free = paths.disk_free(folder)
    if needed > 0 and needed + HEADROOM > free:
        message = (
            f"not enough disk space: {task} needs {size(needed)}, and {size(HEADROOM)} stay in reserve; "
            f"{folder} has {size(free)} free"
        )
        raise StorageFailed(message, hint=hint, needed=needed, free=free, reserve=HEADROOM)


def _storage_failed(error: OSError) -> StorageFailed:
    folder = paths.hub_cache_dir()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or set HF_HOME to a larger disk; then run the command again to continue"
        return StorageFailed(f"the disk of {folder} is full", hint=hint)
    path = Path(error.filename or folder)
    is_inside = not path.is_absolute() or path.is_relative_to(folder)  # rmtree names a file without its folder
    if is_inside and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        hint = f"make {folder} writable for this user, or set HF_HOME to a folder that you can write"
        return StorageFailed(f"cannot write the model cache: {folder} is read-only for this user: {error}", hint=hint)
    hint = f"check {folder}, or set HF_HOME to a folder that you can write"
    return StorageFailed(f"cannot write the model cache: {error}", hint=hint)
