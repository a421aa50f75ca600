"""Publish a complete repository: the links of its snapshot, then the branch.

    models--org--repo/
        blobs/<key>                the files
        localllm.staging/<commit>  links of a snapshot that is not yet published
        snapshots/<commit>/name    links to ../../blobs/<key>; a new snapshot appears with all its links at once
        refs/<branch>              the commit; written last

A snapshot that exists already gets the missing links one by one, in an order that never makes an incomplete
snapshot look complete: other files, the index, the weights, config.json.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ..local.blobs import delete, used_blobs
from .disk import Disk

STAGING = "localllm.staging"  # as deep as `snapshots`, so that the links stay valid


def stage(folder: Path, commit: str, blobs: Mapping[str, str], disk: Disk) -> Path:
    """Create the links of a snapshot in a folder that no program reads. Returns this folder.

    `blobs`: file name → name of its blob, which is complete and verified.
    """
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of a process that died
    staged = staging / commit
    disk.make_folder(staged)
    for name in sorted(blobs):
        _link(staged, name, blobs[name], disk)
    return staged


def publish(folder: Path, commit: str, blobs: Mapping[str, str], disk: Disk) -> Path:
    """Make the files of a snapshot visible. Returns the folder of the snapshot."""
    disk.sync_folder(folder / "blobs")
    snapshot = folder / "snapshots" / commit
    disk.make_folder(snapshot.parent)
    if snapshot.exists():
        for name in sorted(blobs, key=_link_order):
            _link(snapshot, name, blobs[name], disk)
    else:
        staged = stage(folder, commit, blobs, disk)
        for linked in {staged, *((staged / name).parent for name in blobs)}:
            disk.sync_folder(linked)
        disk.rename(staged, snapshot)
    disk.sync_folder(snapshot.parent)
    discard_stage(folder)
    return snapshot


def discard_stage(folder: Path) -> None:
    """Delete the links that `stage` created."""
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def discard(folder: Path, blobs: Iterable[str]) -> None:
    """Delete blobs that no snapshot names, then the folders of the repository that are empty."""
    used = used_blobs(folder)
    for name in set(blobs) - used:
        delete(folder / "blobs" / name)
    with contextlib.suppress(OSError):  # a folder is not empty
        (folder / "blobs").rmdir()
        folder.rmdir()


def write_ref(folder: Path, revision: str, commit: str, disk: Disk) -> None:
    """Make a branch or tag name a commit. The change is atomic."""
    ref = folder / "refs" / revision
    disk.make_folder(ref.parent)
    temporary = ref.with_name(f".{ref.name}.localllm")
    descriptor = disk.open(temporary)
    try:
        disk.resize(descriptor, 0)
        disk.write_at(descriptor, commit.encode("ascii"), 0)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.rename(temporary, ref)
    disk.sync_folder(ref.parent)


def _link(snapshot: Path, name: str, blob: str, disk: Disk) -> None:
    """Create or replace the link of one file."""
    link = snapshot.joinpath(*PurePosixPath(name).parts)
    disk.make_folder(link.parent)
    text = os.path.relpath(snapshot.parent.parent / "blobs" / blob, link.parent)
    if link.is_symlink() and str(link.readlink()) == text:
        return
    temporary = link.with_name(f".{link.name[:60]}.localllm")
    disk.remove(temporary)
    disk.link(text, temporary)
    disk.rename(temporary, link)


def _link_order(name: str) -> tuple[int, str]:
    if name == "config.json":
        return 3, name
    if name.endswith((".safetensors", ".gguf")):
        return 2, name
    return (1 if name.endswith(".index.json") else 0), name
