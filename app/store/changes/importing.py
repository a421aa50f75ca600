"""Adds a model folder or a GGUF file of this machine to the store as `local/NAME`: links to the files, or copies."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from ....engine.files.adapter_config import CONFIG as ADAPTER_CONFIG
from ....engine.files.weight_files import PICKLE_SUFFIXES
from ...errors import AppError, InvalidRequest, ModelUnusable
from ...paths import printable
from .. import names
from ..checks import tokenizer
from ..checks.files import check
from ..disk_errors import check_space, translate_disk_errors
from ..local import ggufs
from ..local.finding import find_all
from ..local.ggufs import is_gguf
from ..local.refs import ModelRef, is_folder, read_ref
from ..names import LOCAL, MAIN, HubName
from ..records import Imported
from ..resolved import use_of
from ..selection import NO_CONFIG, OTHER_REPO, SUBFOLDERS, Selection, gguf_models, select
from ..transfer import lock, publish
from ..transfer.disk import Disk
from ..transfer.leftovers import FOREIGN_SUFFIX

FOLDER = "localllm import takes a folder with config.json, tokenizer.json and *.safetensors, an adapter, or a GGUF file"
BLOCK = 2**20  # bytes
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    path: Path


def import_model(source: Path, name: str = "", *, copy: bool = False, progress: Progress = lambda *_: None) -> ModelRef:
    """Add the model or adapter in a folder to the store, and return it. Without `copy`, the files stay where they are.

    `source` may also be a GGUF file; all shards of its model are added. `name`: the part after `local/`; empty: the
    name of the folder or file. `progress` gets the name of the file that is copied,
    and the bytes of all files: copied, and in total; an error that it raises ends the import. Raises InvalidRequest for
    a malformed or used name or a path that is no model, ModelUnusable for damaged files and for files that no
    backend reads, StorageFailed.
    """
    source = source.expanduser().absolute()
    names.check_path(source)
    is_file = is_gguf(source) and source.is_file()
    if not is_file and not is_folder(source):
        raise _no_folder(source)
    target = _target(name or _default_name(source))
    _refuse_used_name(target)
    _refuse_damaged(source, source)
    selection = _selected_gguf(source) if is_file else _selected(source, target)
    if selection.kind == "gguf":
        _refuse_damaged(source, next(file.path for file in selection.files if is_gguf(file.path)))
    disk = Disk()
    with translate_disk_errors(), lock.locked(target.folder, disk, lambda: _refuse_second_import(target)):
        _refuse_used_name(target)
        shutil.rmtree(target.folder, ignore_errors=True)  # of an import that died
        try:
            _store(target.folder, selection.files, copy, progress, disk)
        except BaseException:
            shutil.rmtree(target.folder, ignore_errors=True)
            raise
    [ref] = find_all(str(target))
    return ref


def describe(ref: ModelRef, *, copied: bool) -> Imported:
    """An import for JSON."""
    use = use_of(ref)
    path = printable(ref.path)
    return Imported(id=ref.id, path=path, size=ref.size, copied=copied, purpose=use.purpose, problem=use.problem)


def _refuse_damaged(source: Path, model: Path) -> None:
    """Raises ModelUnusable for a model, an adapter or a GGUF file with a problem. `source`: the path of the user."""
    if problems := check(read_ref(model)) or list(filter(None, [tokenizer.problem(model)])):
        raise ModelUnusable(f"{source}: {problems[0]}", hint=f"localllm inspect {shlex.quote(str(source))} shows more")


def _no_folder(path: Path) -> AppError:
    """The error for a path that is not a folder. It names the folder to import, or the reason why there is none."""
    text = str(path)[:200]
    suffix = path.suffix.lower()
    if not os.path.exists(path):  # noqa: PTH110 - Path.exists raises an error if the path is too long
        return InvalidRequest(f"{text} does not exist", hint=FOLDER, param="path")
    if suffix in PICKLE_SUFFIXES:
        return ModelUnusable(f"{text} is a pickle file: loading it could run code", hint=OTHER_REPO, param="path")
    if suffix == ".safetensors" and any((path.parent / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        hint = f"import its folder: localllm import {path.parent}"
        return InvalidRequest(f"{text} is one file of a model", hint=hint, param="path")
    if suffix == ".safetensors":
        return ModelUnusable(f"{text}: {NO_CONFIG}", hint=FOLDER, param="path")
    return InvalidRequest(f"{text} is not a folder", hint=FOLDER, param="path")


def _selected(source: Path, target: HubName) -> Selection[_File]:
    """The files of a folder that a load reads. Raises ModelUnusable."""
    files = [*source.iterdir(), *chain.from_iterable(map(source.glob, SUBFOLDERS))]
    present = [_File(str(file.relative_to(source)), file.stat().st_size, file) for file in files if file.is_file()]
    try:
        selection = select(target, present)
    except ModelUnusable as error:
        raise ModelUnusable(error.message.replace(str(target), str(source)), hint=FOLDER) from None
    models = gguf_models(present) if selection.kind == "gguf" else []
    if len(models) > 1:
        hint = f"import one of the files: {', '.join(model[0].name for model in models[:3])}"
        raise ModelUnusable(f"{source} has {len(models)} GGUF models", hint=hint, param="path")
    return selection


def _selected_gguf(source: Path) -> Selection[_File]:
    """The files of the model that a GGUF file belongs to."""
    return Selection("gguf", [_File(file.name, file.size, file.path) for file in ggufs.model_of(source).files])


def _refuse_used_name(target: HubName) -> None:
    if any((target.folder / "snapshots").glob("*")):
        hint = f"choose another name with --name, or delete it with localllm rm {target}"
        raise InvalidRequest(f"{target} is already in the store", hint=hint, param="name")


def _refuse_second_import(target: HubName) -> None:
    raise InvalidRequest(f"another process imports {target} now", hint="choose another name with --name", param="name")


def _target(name: str) -> HubName:
    try:
        target = names.parse(f"{LOCAL}/{name}")
    except InvalidRequest:
        target = None
    if not isinstance(target, HubName) or target.revision or target.quant or "--" in name:
        hint = "a name has up to 96 letters, digits and . _ -, and begins with a letter or digit"
        raise InvalidRequest(f"{name[:200]!r} cannot be the name of a model", hint=hint, param="name")
    return target


def _default_name(source: Path) -> str:
    name = ggufs.name_of(source) if is_gguf(source) else source.resolve().name
    return re.sub(r"[^A-Za-z0-9._]+|-{2,}", "-", name).strip(".-_")[:96] or "model"


def _store(folder: Path, files: list[_File], copy: bool, progress: Progress, disk: Disk) -> None:
    """Create the snapshot and the branch main. The commit depends on the files."""
    total = sum(file.size for file in files)
    if copy:
        check_space(total, "the copy", "import without --copy")
    blobs = folder / "blobs"
    staging = folder / publish.STAGING / "import"  # as deep as a snapshot
    disk.make_folder(blobs)
    disk.make_folder(staging)
    identity = hashlib.sha1()
    done = 0
    for file in files:
        progress(file.name, done, total)
        link = staging / file.name
        disk.make_folder(link.parent)
        if copy:
            blob = _copy(file.path, blobs, partial(_add, progress, file.name, done, total))
            identity.update(f"{file.name}\0{blob}\n".encode())
            disk.link(os.path.relpath(blobs / blob, link.parent), link)
        else:
            identity.update(f"{file.name}\0{file.size}\0{file.path.stat().st_mtime_ns}\n".encode())
            disk.link(str(file.path.resolve()), link)
        done += file.size
    progress("", total, total)
    commit = identity.hexdigest()
    disk.make_folder(folder / "snapshots")
    for changed in (blobs, staging):
        disk.sync_folder(changed)
    disk.rename(staging, folder / "snapshots" / commit)  # atomic: a model is never visible in part
    disk.sync_folder(folder / "snapshots")
    publish.discard_stage(folder)
    publish.write_ref(folder, MAIN, commit, disk)


def _add(progress: Progress, name: str, before: int, total: int, copied: int) -> None:
    progress(name, before + copied, total)


def _copy(source: Path, blobs: Path, progress: Callable[[int], None]) -> str:
    """Copy a file to the blob with the name of its SHA-256. Returns this name. `progress` gets the copied bytes."""
    temporary = blobs / f"import-{os.getpid()}{FOREIGN_SUFFIX}"  # an unfinished file for list and prune
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
