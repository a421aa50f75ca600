"""Adds a model folder of this machine to the store, as the repository `local/NAME`: links to the files, or copies."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .. import paths
from ..errors import InvalidRequest, ModelUnusable, StorageFailed
from ..sizes import size
from . import cache, names
from .check import check
from .names import LOCAL, MAIN, HubName
from .selection import select

BLOCK = 2**20  # bytes
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    path: Path


def import_model(
    source: Path, name: str = "", *, copy: bool = False, progress: Progress = lambda *_: None
) -> cache.ModelRef:
    """Add the model or adapter in a folder to the store, and return it. Without `copy`, the files stay where they are.

    `name`: the part after `local/`; empty: the name of the folder. `progress` gets the name of the file that is copied,
    and the bytes of all files: copied, and in total; an error that it raises ends the import. Raises InvalidRequest for
    a malformed or used name or a path that is not a folder, ModelUnusable for damaged files, StorageFailed.
    """
    source = source.expanduser().absolute()
    if not source.is_dir():
        hint = "a model is a folder with config.json, tokenizer.json and *.safetensors"
        raise InvalidRequest(f"{source} is not a folder", hint=hint, param="path")
    target = _target(name or _default_name(source))
    if target.folder.exists():
        hint = f"choose another name with --name, or delete it with localllm rm {target}"
        raise InvalidRequest(f"{target} is already in the store", hint=hint, param="name")
    if problems := check(source):
        raise ModelUnusable(f"{source}: {problems[0]}", hint="localllm inspect shows more")
    present = [_File(file.name, file.stat().st_size, file) for file in source.iterdir() if file.is_file()]
    selection = select(target, present)
    if copy:
        _check_space(selection.files)
    try:
        commit = _store(target.folder, selection.files, copy, progress)
        (target.folder / "refs").mkdir()
        (target.folder / "refs" / MAIN).write_text(commit, "ascii")
    except BaseException as error:
        shutil.rmtree(target.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageFailed(f"cannot import {source}: {error}") from None
        raise
    find = cache.resolve_adapter if selection.kind == "adapter" else cache.resolve
    return find(str(target))


def _target(name: str) -> HubName:
    target = names.parse(f"{LOCAL}/{name}")
    if not isinstance(target, HubName) or target.revision or target.quant or "--" in name:
        hint = "a name has up to 96 letters, digits and . _ -, and begins with a letter or digit"
        raise InvalidRequest(f"{name[:200]!r} cannot be the name of a model", hint=hint, param="name")
    return target


def _default_name(source: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._]+|-{2,}", "-", source.resolve().name).strip(".-_")[:96] or "model"


def _store(folder: Path, files: list[_File], copy: bool, progress: Progress) -> str:
    """Create the snapshot. Returns its commit, which depends on the files."""
    staging = folder / "snapshots" / f".import-{os.getpid()}"
    (folder / "blobs").mkdir(parents=True)
    staging.mkdir(parents=True)
    identity = hashlib.sha1()
    total = sum(file.size for file in files)
    done = 0
    for file in files:
        progress(file.name, done, total)
        link = staging / file.name
        if copy:
            blob = _copy(file.path, folder / "blobs", partial(_add, progress, file.name, done, total))
            identity.update(f"{file.name}\0{blob}\n".encode())
            link.symlink_to(Path("../../blobs") / blob)
        else:
            identity.update(f"{file.name}\0{file.size}\0{file.path.stat().st_mtime_ns}\n".encode())
            link.symlink_to(file.path.resolve())
        done += file.size
    staging.rename(staging.with_name(identity.hexdigest()))  # atomic: a model is never visible in part
    return identity.hexdigest()


def _add(progress: Progress, name: str, before: int, total: int, copied: int) -> None:
    progress(name, before + copied, total)


def _copy(source: Path, blobs: Path, progress: Callable[[int], None]) -> str:
    """Copy a file to the blob with the name of its SHA-256. Returns this name. `progress` gets the copied bytes."""
    temporary = blobs / f".import-{os.getpid()}"
    digest = hashlib.sha256()
    with source.open("rb") as reader, temporary.open("wb") as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            writer.write(block)
            progress(writer.tell())
        writer.flush()
        os.fsync(writer.fileno())
    temporary.rename(blobs / digest.hexdigest())
    return digest.hexdigest()


def _check_space(files: list[_File]) -> None:
    needed = sum(file.size for file in files)
    free = paths.disk_free(paths.hub_cache_dir())
    if needed > free:
        message = f"not enough disk space: the copy needs {size(needed)}, {paths.hub_cache_dir()} has {size(free)} free"
        raise StorageFailed(message, hint="import without --copy", needed=needed, free=free)
