"""Finds files in the cache that nothing uses: blobs without a snapshot, and unfinished downloads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .. import names
from ..disk_errors import translate_disk_errors
from ..local import snapshots
from ..local.blobs import delete as delete_blob
from ..local.blobs import own_bytes, unused_blobs, used_blobs
from ..records import Pruning, UnusedFiles
from ..transfer.leftovers import partials
from ..transfer.lock import is_locked, unless_locked

STALE_SECONDS = 24 * 3600.0  # a file that changed since then may belong to a download that runs in another program


def prune(*, everything: bool, confirm: Callable[[int, int], bool]) -> Pruning:
    """Delete the files that no model uses. `confirm` gets their number and bytes; False: they stay.

    `everything`: also files that changed in the last 24 hours. Raises StorageFailed if a file cannot be deleted.
    """
    unused = find_unused(everything=everything)
    total = sum(item.disk_bytes for item in unused)
    is_deleted = bool(unused) and confirm(len(unused), total)
    return Pruning(unused=unused, bytes=total, deleted=is_deleted, freed=delete(unused) if is_deleted else 0)


def find_unused(*, everything: bool = False) -> list[UnusedFiles]:
    """The unused files of all repositories that no download uses now.

    Files that changed in the last 24 hours are left out, unless `everything`.
    """
    unused: list[UnusedFiles] = []
    for folder in snapshots.repo_folders():
        blobs = folder / "blobs"
        if folder.is_symlink() or blobs.is_symlink() or is_locked(folder):
            continue
        unused += _unused_of(folder)
    return [item for item in unused if everything or _is_stale(item)]


def delete(items: Iterable[UnusedFiles]) -> int:
    """Delete the files of a plan. Returns the freed bytes.

    Files stay if a download of their repository runs now, or if a snapshot uses them meanwhile.
    Raises StorageFailed if a file cannot be deleted.
    """
    freed = 0
    for item in items:
        with unless_locked(Path(item.folder)) as is_idle:
            if is_idle and not _is_used(item):
                with translate_disk_errors():
                    for path in item.paths:
                        _delete_one(Path(path))
                freed += item.disk_bytes
    return freed


def _is_used(item: UnusedFiles) -> bool:
    return item.kind == "blob" and Path(item.paths[0]).name in used_blobs(Path(item.folder))


def _unused_of(folder: Path) -> Iterator[UnusedFiles]:
    unfinished: set[Path] = set()
    for leftover in partials(folder):
        unfinished.update(leftover.paths)
        yield _describe(folder, "partial", leftover.paths, leftover.disk_bytes, leftover.resumable)
    for blob in unused_blobs(folder):
        if blob not in unfinished:
            yield _describe(folder, "blob", (blob,), own_bytes(blob))


def _describe(
    folder: Path, kind: str, paths: tuple[Path, ...], disk_bytes: int, resumable: bool = False
) -> UnusedFiles:
    return UnusedFiles(
        repo=names.repo_of_folder(folder),
        folder=str(folder),
        kind=kind,
        paths=[str(path) for path in paths],
        disk_bytes=disk_bytes,
        resumable=resumable,
    )


def _is_stale(item: UnusedFiles) -> bool:
    last_change = max((os.lstat(path).st_mtime for path in item.paths if os.path.lexists(path)), default=0.0)
    return time.time() - last_change > STALE_SECONDS


def _delete_one(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        delete_blob(path)
