"""The files that the links of a snapshot name.

    snapshots/<commit>/name  →  ../../blobs/<hash>  →  ../../blobs/ab/<other hash>

The second link is huggingface_hub's: it stores equal files of several repositories once, in the folder `blobs` of the
cache, under another hash.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from ... import paths

UNVERIFIED = "unverified-"  # start of the name of a blob whose hash no hub has confirmed; its SHA-256 follows


def blob_of(link: Path) -> Path | None:
    """The file, or the link of huggingface_hub, that the link of a snapshot names; None if the path is no link."""
    try:
        target = link.readlink()
    except OSError:
        return None
    path = link.parent / target
    return Path(os.path.realpath(path.parent)) / path.name  # the last link stays


def used_blobs(folder: Path) -> set[str]:
    """The names of the blobs of a repository folder that a link in a snapshot names."""
    identity = cache(_identity)  # the links of a snapshot have one parent folder
    root = identity(folder / "blobs")
    used = set()
    for link in (folder / "snapshots").rglob("*"):
        with suppress(OSError):  # no link
            path = link.parent / link.readlink()
            if root is not None and identity(path.parent) == root:
                used.add(path.name)
    return used


def _identity(folder: Path) -> tuple[int, int] | None:
    """The number of a folder on this machine, equal for all paths to it; None if it does not exist."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def unused_blobs(folder: Path) -> list[Path]:
    """The files in `blobs` of a repository folder that no snapshot names: complete ones, and those of downloads."""
    files = [file for file in (folder / "blobs").glob("*") if file.is_file() or file.is_symlink()]
    used = used_blobs(folder) if files else set()
    return sorted(file for file in files if file.name not in used)


def is_unverified(blob: Path) -> bool:
    """True if no hub vouches for the bytes of a blob."""
    return blob.name.startswith(UNVERIFIED)


def has_shared(folder: Path) -> bool:
    """True if files of a repository folder are in the folder that repositories share."""
    return any(blob.is_symlink() for blob in (folder / "blobs").glob("*"))


def own_bytes(blob: Path) -> int:
    """Bytes of disk space that the deletion of a blob frees: none if another repository shares its content."""
    try:
        if blob.is_symlink():
            content = blob.resolve()
            users = content.with_name(f"{content.name}.refs").read_text("utf-8").splitlines()
            return content.stat().st_blocks * 512 if len(set(users)) == 1 else 0
        return blob.stat().st_blocks * 512
    except (OSError, UnicodeDecodeError):
        return 0


def delete(blob: Path) -> None:
    """Delete a blob, and its content in the shared folder if no other repository shares it."""
    if not blob.is_symlink():
        blob.unlink(missing_ok=True)
        return
    from huggingface_hub import DeleteCacheStrategy

    none: frozenset[Path] = frozenset()
    blobs = frozenset({blob})
    DeleteCacheStrategy(0, blobs, refs=none, repos=none, snapshots=none, cache_dir=paths.hub_cache_dir()).execute()
