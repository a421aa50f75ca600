"""Finds files in the cache that nothing uses: blobs without a snapshot, and unfinished downloads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import names
from .disk_errors import translate_disk_errors
from .local import cache
from .local.blobs import delete as delete_blob
from .local.blobs import own_bytes, unused_blobs, used_blobs
from .transfer.leftovers import partials
from .transfer.lock import is_locked, unless_locked

STALE_SECONDS = 24 * 3600.0  # a file that changed since then may belong to a download that runs in another program


@dataclass(frozen=True, slots=True)
class Unused:
    """Files that no model uses."""

    repo: str
    folder: Path  # of the repository in the cache
    kind: str  # blob, or partial
    paths: tuple[Path, ...]  # in the order of deletion
    disk_bytes: int
    resumable: bool = False  # a pull would continue this download


def find_unused(*, everything: bool = False) -> list[Unused]:
    """The unused files of all repositories that no download uses now.

    Files that changed in the last 24 hours are left out, unless `everything`.
    """
    unused: list[Unused] = []
    for folder in cache.repo_folders():
        blobs = folder / "blobs"
        if folder.is_symlink() or blobs.is_symlink() or is_locked(folder):
            continue
        unused += _unused_of(folder)
    return [item for item in unused if everything or _is_stale(item)]


def delete(items: Iterable[Unused]) -> int:
    """Delete the files of a plan. Returns the freed bytes.

    Files stay if a download of their repository runs now, or if a snapshot uses them meanwhile.
    Raises StorageFailed if a file cannot be deleted.
    """
    freed = 0
    for item in items:
        with unless_locked(item.folder) as is_idle:
            if is_idle and not _is_used(item):
                with translate_disk_errors():
                    for path in item.paths:
                        _delete_one(path)
                freed += item.disk_bytes
    return freed


def _is_used(item: Unused) -> bool:
    return item.kind == "blob" and item.paths[0].name in used_blobs(item.folder)


def _unused_of(folder: Path) -> Iterator[Unused]:
    repo = names.repo_of_folder(folder)
    unfinished: set[Path] = set()
    for leftover in partials(folder):
        unfinished.update(leftover.paths)
        yield Unused(repo, folder, "partial", leftover.paths, leftover.disk_bytes, leftover.resumable)
    for blob in unused_blobs(folder):
        if blob not in unfinished:
            yield Unused(repo, folder, "blob", (blob,), own_bytes(blob))


def _is_stale(item: Unused) -> bool:
    newest = max((path.lstat().st_mtime for path in item.paths if os.path.lexists(path)), default=0.0)
    return time.time() - newest > STALE_SECONDS


def _delete_one(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        delete_blob(path)
