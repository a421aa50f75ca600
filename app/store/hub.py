"""Hugging Face: errors of huggingface_hub, and deletion from the shared cache."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..errors import AppError, DownloadFailed, InvalidRequest, ModelNotFound, StorageFailed
from . import cache
from .names import GUIDE, MAIN, HubName, is_path, parse_hub

RETRY_HINT = "check the network and the proxy settings; then run the command again to continue"


@contextmanager
def translate_errors(name: HubName) -> Iterator[None]:
    """Turn errors of huggingface_hub and of the disk into AppErrors."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.FileMetadataError) as error:
        raise _hub_error(name, error) from error
    except errors.XetDownloadError as error:
        raise DownloadFailed(f"the download of {name.repo} failed: {error}", hint=RETRY_HINT) from error
    except OSError as error:
        raise _disk_error(error) from error


def _disk_error(error: OSError) -> StorageFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space, or set HF_HOME to a larger disk; then run the command again to continue"
        return StorageFailed(f"the disk of {paths.hub_cache_dir()} is full", hint=hint)
    return StorageFailed(f"cannot write the model cache: {error}")


def _hub_error(name: HubName, error: Exception) -> AppError:
    from huggingface_hub import constants, errors

    match error:
        case errors.OfflineModeIsEnabled():
            return DownloadFailed(f"cannot download {name.repo}: offline mode is on", hint="unset HF_HUB_OFFLINE")
        case errors.GatedRepoError():
            hint = "request access on its page, then set HF_TOKEN to a token of your account"
            return DownloadFailed(f"{name.repo} is gated: you do not have access", hint=hint)
        case errors.RevisionNotFoundError():
            revision = name.revision or MAIN
            hint = "omit @revision to use the main branch"
            return ModelNotFound(f"{name.repo} has no branch, tag or commit {revision!r}", hint=hint, param="model")
        case errors.RepositoryNotFoundError():
            hint = "check the spelling; for a private model, set HF_TOKEN"
            return ModelNotFound(f"no model {name.repo!r} at {constants.ENDPOINT}", hint=hint, param="model")
        case errors.HfHubHTTPError():
            return _status_error(name, error.response.status_code)
        case _:
            message = f"cannot reach {constants.ENDPOINT}: {error or type(error).__name__}"
            return DownloadFailed(message, hint=RETRY_HINT)


def _status_error(name: HubName, status: int) -> DownloadFailed:
    from huggingface_hub import constants

    if status in (401, 403):
        return DownloadFailed(f"{constants.ENDPOINT} denies access to {name.repo} ({status})", hint="check HF_TOKEN")
    hint = "try again later; completed files are kept"
    return DownloadFailed(f"{constants.ENDPOINT} returned status {status} for {name.repo}", hint=hint)


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned deletion; `execute()` deletes the files."""

    name: str
    frees: int  # bytes of disk space that the deletion frees
    execute: Callable[[], None]


def plan_removal(name: str) -> Removal:
    """Plan to delete a repo (`org/repo`, also an incomplete one) or one revision of a repo (`org/repo@revision`).

    Raises ModelNotFound if the repo is not in the cache, InvalidRequest for a malformed name.
    """
    if name == GUIDE:
        hint = "uninstall localllm to remove it"
        raise InvalidRequest("guide is built in and cannot be deleted", hint=hint, param="model")
    target = parse_hub(name)
    if not target.folder.is_dir():
        raise ModelNotFound(f"model {target.repo!r} is not in {paths.hub_cache_dir()}", hint="see localllm list")
    if target.revision:
        return _plan_revision_removal(target)
    snapshots = list((target.folder / "snapshots").glob("*"))
    folders = [target.folder, *_packed_outside(snapshots)]
    return Removal(target.repo, sum(map(_size, folders)), lambda: _remove(folders))


def _plan_revision_removal(target: HubName) -> Removal:
    from huggingface_hub import scan_cache_dir

    commit = cache.refs(target.folder).get(target.revision, target.revision)
    folders = (target.folder / "snapshots").glob("*")
    snapshots = [folder for folder in folders if cache.is_commit(commit, folder.name)]
    if len(snapshots) != 1:
        message = f"{target.repo} has no revision {target.revision!r} on this machine"
        raise ModelNotFound(message, hint="see localllm list --json")
    plan = scan_cache_dir(paths.hub_cache_dir()).delete_revisions(snapshots[0].name)
    packed = _packed_outside(snapshots)

    def execute() -> None:
        plan.execute()
        _remove(packed)

    frees = plan.expected_freed_size + sum(map(_size, packed))
    return Removal(f"{target.repo}@{target.revision}", frees, execute)


def plan_adapter_removal(name: str) -> Removal:
    """Plan to delete a downloaded adapter. Raises AdapterNotFound, or InvalidRequest for files of the user."""
    if is_path(name):
        raise InvalidRequest(
            f"{name} is not in the model cache: localllm deletes only files that it downloaded",
            hint="delete the folder yourself",
        )
    adapter = cache.resolve_adapter(name)
    if cache.is_complete(adapter.path):
        raise InvalidRequest(f"{adapter.id} is also a model", hint=f"delete both with localllm rm {adapter.id}")
    return plan_removal(name)


def plan_packed_removal(name: str) -> Removal:
    """Plan to delete the cached quantised weights of a model. Raises ModelNotFound if there are none."""
    model = cache.resolve(name, allow_path=True)
    folder = paths.packed_dir(model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"{model.id} has no cached quantised weights", hint="see localllm list")
    return Removal(f"the cached quantised weights of {model.id}", _size(folder), lambda: _remove([folder]))


def _packed_outside(snapshots: Sequence[Path]) -> list[Path]:
    """The folders of cached quantised weights of the snapshots, without those inside a snapshot folder."""
    folders = [paths.packed_dir(snapshot) for snapshot in snapshots]
    return [folder for folder in folders if folder.is_dir() and folder.parent not in snapshots]


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder. Symbolic links do not count."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
