"""Errors of the disk, as errors of the app."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .. import paths
from ..errors import StorageFailed


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


def _storage_failed(error: OSError) -> StorageFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or set HF_HOME to a larger disk; then run the command again to continue"
        return StorageFailed(f"the disk of {paths.hub_cache_dir()} is full", hint=hint)
    hint = f"check {paths.hub_cache_dir()}, or set HF_HOME to a folder that you can write"
    return StorageFailed(f"cannot write the model cache: {error}", hint=hint)
