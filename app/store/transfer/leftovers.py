"""Unfinished downloads in the cache: those of localllm, which a pull continues, and those of huggingface_hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .journal import SUFFIX as JOURNAL_SUFFIX
from .journal import read_record
from .lock import is_locked
from .partial import DATA_SUFFIX
from .publish import STAGING

FOREIGN_SUFFIX = ".incomplete"  # files of huggingface_hub; each attempt has a new name, and none is continued


@dataclass(frozen=True, slots=True)
class Leftover:
    """The files of one unfinished download."""

    paths: tuple[Path, ...]  # delete them in this order
    disk_bytes: int
    received: int  # bytes that a pull does not download again; 0: nothing can be continued
    size: int  # bytes of the complete file; 0: unknown
    resumable: bool  # False: of huggingface_hub, or without a journal
    active: bool  # a localllm process downloads this repository now
    key: str = ""  # of the file (remote.RemoteFile.key); empty: not of localllm
    revision: str = ""  # for which the file was requested; empty: unknown


def partials(folder: Path) -> list[Leftover]:
    """The unfinished downloads of one repository folder (`models--org--repo`)."""
    active = is_locked(folder)
    leftovers = []
    names = sorted(_names(folder / "blobs"))
    for name in names:
        if name.endswith(DATA_SUFFIX):
            leftovers.append(_resumable(folder / "blobs", name.removesuffix(DATA_SUFFIX), active))
        elif name.endswith(JOURNAL_SUFFIX) and name.removesuffix(JOURNAL_SUFFIX) + DATA_SUFFIX not in names:
            leftovers.append(_single(folder / "blobs" / name, active, name.removesuffix(JOURNAL_SUFFIX)))
        elif name.endswith(FOREIGN_SUFFIX):
            leftovers.append(_single(folder / "blobs" / name, active=False))
    if (folder / STAGING).is_dir() and not active:
        leftovers.append(_staging(folder / STAGING))
    return leftovers


def _names(blobs: Path) -> list[str]:
    try:
        return [file.name for file in blobs.iterdir()]
    except OSError:
        return []


def _resumable(blobs: Path, key: str, active: bool) -> Leftover:
    data = blobs / (key + DATA_SUFFIX)
    journal = blobs / (key + JOURNAL_SUFFIX)
    try:
        record = read_record(journal)
    except (OSError, ValueError):
        return _single(data, active, key)
    disk_bytes = _disk_bytes(data) + _disk_bytes(journal)
    return Leftover(
        (data, journal), disk_bytes, record.received, record.size, True, active, record.key, record.revision
    )


def _single(file: Path, active: bool, key: str = "") -> Leftover:
    return Leftover((file,), _disk_bytes(file), 0, 0, False, active, key)


def _staging(folder: Path) -> Leftover:
    """The links of a snapshot that was not published."""
    return Leftover(tuple(_from_leaves(folder)), 0, 0, 0, False, False)


def _from_leaves(folder: Path) -> Iterator[Path]:
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink():
            yield from _from_leaves(child)
        else:
            yield child
    yield folder


def _disk_bytes(file: Path) -> int:
    """Bytes that a file takes on the disk; holes take none."""
    with contextlib.suppress(OSError):
        return file.stat().st_blocks * 512
    return 0
