"""Deletion from the shared Hugging Face cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ... import paths
from ...errors import InvalidRequest, ModelNotFound, StorageFailed
from .. import catalog, preferences, resolved, suggestions
from ..disk_errors import translate_disk_errors
from ..local import ggufs, snapshots
from ..local.blobs import blob_of, has_shared, own_bytes
from ..local.blobs import delete as delete_blob
from ..local.finding import find_all
from ..names import GUIDE, WEIGHT_FILES, FileAddress, HubName, ShortName, is_path, parse, parse_hub
from ..records import Removed
from ..selection import first_shard, gguf_quant
from ..transfer.lock import unless_locked

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy, HFCacheInfo


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned deletion; `execute()` deletes the files."""

    name: str
    frees: int  # bytes of disk space that the deletion frees
    execute: Callable[[], None]  # raises InvalidRequest if a transfer of the repository runs, or StorageFailed
    folders: tuple[Path, ...] = ()  # the deleted folders of models, and the deleted GGUF files
    aliases: tuple[str, ...] = ()  # the aliases of the deleted files; `execute` removes them too

    @property
    def result(self) -> Removed:
        """The name, the bytes and the aliases that `execute` has deleted, for JSON."""
        return Removed(deleted=self.name, freed=self.frees, aliases=self.aliases)


def plan_removal(name: str) -> Removal:
    """Plan to delete a repo (`org/repo`, also an incomplete one), one revision of a repo (`org/repo@revision`), or one
    GGUF model of a repo (`org/repo:QUANT`).

    The deletion removes the aliases of these files too. Raises ModelNotFound if the repo is not in the cache,
    InvalidRequest for a malformed name.
    """
    plan = _plan_files_removal(name)
    aliases = tuple(alias for alias, target in preferences.read().aliases.items() if plan.name in _names(target))

    def execute() -> None:
        plan.execute()
        for alias in aliases:
            preferences.set_alias(alias, None)

    return replace(plan, execute=execute, aliases=aliases)


def _names(target: str) -> tuple[str, ...]:
    """The names of the files and of the repository that an alias selects. Empty for a target that is neither."""
    try:
        name = catalog.expand(parse(target))
    except InvalidRequest:  # the user has edited the file
        return ()
    if isinstance(name, FileAddress):
        name = HubName(name.repo)
    return (str(name), name.id) if isinstance(name, HubName) else ()


def _refuse_foreign(name: str) -> None:
    """Raises InvalidRequest for the models and adapters that localllm brings, and for files of the user."""
    if name == GUIDE:
        hint = "uninstall localllm to remove it"
        raise InvalidRequest("guide is built in and cannot be deleted", hint=hint, param="model")
    if any(adapter.id == name for adapter in snapshots.builtin_adapters()):
        raise InvalidRequest(f"{name} is built in and cannot be deleted", param="name")
    if is_path(name):
        raise _not_stored(name)


def _plan_files_removal(name: str) -> Removal:
    _refuse_foreign(name)
    target = _target(name)
    if not target.folder.is_dir():
        message = f"model {target.id!r} is not in {paths.hub_cache_dir()}"
        raise ModelNotFound(message, hint=suggestions.hint_for_stored(name, snapshots.ids()), param="model")
    if (target.quant or target.file) and (plan := _plan_gguf_removal(target)):
        return plan
    if target.revision:
        return _plan_revision_removal(target)
    packed = _packed_outside(list((target.folder / "snapshots").glob("*")))
    shared = _shared_strategy(target.folder)

    def remove() -> None:
        if shared is not None:
            shared.execute()
        _remove([target.folder, *packed])

    frees = sum(map(_size, packed))
    frees += _size(target.folder) if shared is None else shared.expected_freed_size
    return Removal(target.id, frees, partial(_remove_unless_locked, target, remove), (target.folder,))


def _shared_strategy(folder: Path) -> DeleteCacheStrategy | None:
    """The plan of huggingface_hub to delete a repository and the files that no other repository shares with it.

    None if it shares no files.
    """
    if folder.is_symlink() or not has_shared(folder):
        return None
    from huggingface_hub import scan_cache_dir

    scanned = _only(scan_cache_dir(paths.hub_cache_dir()), folder)
    commits = [revision.commit_hash for repo in scanned.repos for revision in repo.revisions]
    return scanned.delete_revisions(*commits)


def _only(scanned: HFCacheInfo, folder: Path) -> HFCacheInfo:
    """The scan of one repository. huggingface_hub deletes a commit in one of the repositories that have it, but a
    renamed repository has two names."""
    path = folder.resolve()
    return replace(scanned, repos=frozenset(repo for repo in scanned.repos if repo.repo_path.resolve() == path))


def _remove_unless_locked(target: HubName, remove: Callable[[], None]) -> None:
    with unless_locked(target.folder) as is_idle:
        if not is_idle:
            hint = "cancel the download first"
            raise InvalidRequest(f"{target.id} is being downloaded", hint=hint, param="model")
        with translate_disk_errors():
            remove()


def _not_stored(path: str) -> InvalidRequest:
    message = f"{path[:200]} is not in the model cache: localllm deletes only files that it downloaded or imported"
    return InvalidRequest(message, hint="delete the folder yourself; localllm list shows the names of models")


def _target(name: str) -> HubName:
    """The repository of a name, an alias, a short name or the address of a file. Raises InvalidRequest."""
    parsed = parse(name)
    target = catalog.expand(parsed)
    if target is None and isinstance(parsed, ShortName):
        target = HubName(parsed.family, parsed.revision)  # a cached repository without an organisation
        if parsed.tag or not target.folder.is_dir():
            message = f"model {name[:200]!r} is not on this machine"
            raise ModelNotFound(message, hint=suggestions.hint_for_stored(name, snapshots.ids()), param="model")
    if isinstance(target, FileAddress):
        target = HubName(target.repo)
    if isinstance(target, ShortName):
        raise InvalidRequest(f"{name[:200]!r} is not a downloaded model", hint="see localllm list", param="model")
    return target if isinstance(target, HubName) else parse_hub(name)


def _plan_gguf_removal(target: HubName) -> Removal | None:
    """Plan to delete the files of one GGUF model of a repository; None if the repository has no other weights.

    Raises ModelNotFound if the name selects no files on this machine.
    """
    links = _weights_in(_selected_snapshots(target))
    chosen = [link for link in links if _is_selected(target, link)]
    if not chosen:
        quants = ", ".join(sorted({gguf_quant(link.name) for link in links} - {""})) or "none"
        selected = target.file or target.quant
        message = f"{target.id} has no GGUF file {selected} on this machine"
        raise ModelNotFound(message, hint=f"it has {quants}", param="model")
    if len(chosen) == len(_weights_in(_snapshots(target))):
        return None
    blobs = _only_used_by(target.folder, chosen)

    def remove() -> None:
        for link in chosen:
            link.unlink(missing_ok=True)
        for blob in blobs:
            delete_blob(blob)

    frees = sum(map(own_bytes, blobs))
    models = tuple({ggufs.model_of(link).path for link in chosen if link.is_file()})
    return Removal(str(target), frees, partial(_remove_unless_locked, target, remove), models)


def _snapshots(target: HubName) -> list[Path]:
    return sorted((target.folder / "snapshots").glob("*"))


def _selected_snapshots(target: HubName) -> list[Path]:
    """The snapshots of the revision in a name; all snapshots if the name has none."""
    if not target.revision:
        return _snapshots(target)
    return [target.folder / "snapshots" / commit for commit in snapshots.commits_of(target.folder, target.revision)]


def _weights_in(folders: Sequence[Path]) -> list[Path]:
    """The links of the weight files in snapshots, also of missing files."""
    return [path for folder in folders for path in folder.rglob("*") if path.suffix.lower() in WEIGHT_FILES]


def _is_selected(target: HubName, link: Path) -> bool:
    """Whether the name of a GGUF model selects the file of a link."""
    if not ggufs.is_gguf(link):
        return False
    if target.file:
        return first_shard(PurePosixPath(target.file).name) == first_shard(link.name)
    return gguf_quant(link.name) == target.quant


def _only_used_by(folder: Path, links: Sequence[Path]) -> list[Path]:
    """The blobs of a repository that only these links of its snapshots name."""
    root = Path(os.path.realpath(folder / "blobs"))
    others = {blob_of(link) for link in (folder / "snapshots").rglob("*") if link not in links}
    blobs = {blob for link in links if (blob := blob_of(link)) is not None}
    return sorted(blob for blob in blobs - others if blob.parent == root)


def _plan_revision_removal(target: HubName) -> Removal:
    from huggingface_hub import scan_cache_dir

    selected = _selected_snapshots(target)
    if len(selected) != 1:
        message = f"{target.id} has no revision {target.revision!r} on this machine"
        raise ModelNotFound(message, hint="see localllm list --json")
    scanned = _only(scan_cache_dir(paths.hub_cache_dir()), target.folder)
    if not scanned.repos:
        message = f"cannot delete one revision of {target.id}: its folder is damaged"
        raise StorageFailed(message, hint=f"localllm rm {target.id} deletes all revisions")
    plan = scanned.delete_revisions(selected[0].name)
    packed = _packed_outside(selected)

    def execute() -> None:
        plan.execute()
        _remove(packed)

    frees = plan.expected_freed_size + sum(map(_size, packed))
    name = f"{target.id}@{target.revision}"
    return Removal(name, frees, partial(_remove_unless_locked, target, execute), tuple(selected))


def plan_adapter_removal(name: str) -> Removal:
    """Plan to delete a downloaded adapter. Raises AdapterNotFound, or InvalidRequest for files of the user."""
    if is_path(name):
        raise _not_stored(name)
    adapter = resolved.adapter(name)
    if adapter.bundled:
        raise InvalidRequest(f"{name} is built in and cannot be deleted", param="name")
    if any(ref.kind == "model" and ref.is_complete for ref in find_all(name)):
        raise InvalidRequest(f"{adapter.id} is also a model", hint=f"delete both with localllm rm {adapter.id}")
    return plan_removal(name)


def plan_packed_removal(name: str) -> Removal:
    """Plan to delete the cached quantised weights of a model. Raises ModelNotFound if there are none."""
    model = resolved.model(name, allow_path=True)
    folder = paths.packed_dir(model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"{model.id} has no cached quantised weights", hint="see localllm list")
    return Removal(f"the cached quantised weights of {model.id}", _size(folder), lambda: _remove([folder]))


def _packed_outside(folders: Sequence[Path]) -> list[Path]:
    """The folders of cached quantised weights of snapshots, without those inside a snapshot."""
    packed = [paths.packed_dir(folder) for folder in folders]
    return [folder for folder in packed if folder.is_dir() and folder.parent not in folders]


def _remove(folders: Sequence[Path]) -> None:
    for folder in filter(os.path.lexists, folders):
        if folder.is_symlink():  # its files belong to another folder
            folder.unlink()
        else:
            shutil.rmtree(folder)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder. Symbolic links do not count."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
