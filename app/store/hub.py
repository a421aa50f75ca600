"""Hugging Face: repo names, translation of its errors, and deletion from the shared cache."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .. import paths
from ..errors import AppError, DownloadFailed, InvalidRequest, ModelNotFound, StorageFailed
from . import catalog


@dataclass(frozen=True, slots=True)
class HubName:
    """The parts of `org/repo@revision`."""

    repo: str
    revision: str  # branch, tag or commit; empty: not given

    @property
    def folder(self) -> Path:
        """The folder of the repo in the shared cache."""
        return paths.hub_cache_dir() / f"models--{self.repo.replace('/', '--')}"


def parse(name: str) -> HubName:
    """Split a name. Raises InvalidRequest unless it is org/repo with an optional @revision."""
    parts = catalog.NAME.fullmatch(name)
    if not parts or parts["repo"].count("/") != 1 or ".." in name:
        hint = "for example Qwen/Qwen3-0.6B, or Qwen/Qwen3-0.6B@main for one branch, tag or commit"
        raise InvalidRequest(f"{name!r} is not a Hugging Face model name (org/repo)", hint=hint, param="model")
    return HubName(parts["repo"], parts["revision"] or "")


@contextmanager
def translate_errors(name: HubName) -> Iterator[None]:
    """Translate errors of huggingface_hub and of the disk into AppErrors."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.FileMetadataError) as error:
        raise _translation(name, error) from error
    except errors.XetDownloadError as error:
        raise DownloadFailed(f"the download of {name.repo} failed: {error}", hint=RETRY_HINT) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space, or set HF_HOME to a larger disk; then run the command again to continue"
            raise StorageFailed(f"the disk of {paths.hub_cache_dir()} is full", hint=hint) from error
        raise StorageFailed(f"cannot write the model cache: {error}") from error


RETRY_HINT = "check the network and the proxy settings; then run the command again to continue"


def _translation(name: HubName, error: Exception) -> AppError:
    from huggingface_hub import constants, errors

    revision = name.revision or catalog.MAIN
    match error:
        case errors.OfflineModeIsEnabled():
            return DownloadFailed(f"cannot download {name.repo}: offline mode is on", hint="unset HF_HUB_OFFLINE")
        case errors.GatedRepoError():
            hint = "request access on its page, then set HF_TOKEN to a token of your account"
            return DownloadFailed(f"{name.repo} is gated: you do not have access", hint=hint)
        case errors.RevisionNotFoundError():
            hint = "omit @revision to use the main branch"
            return ModelNotFound(f"{name.repo} has no branch, tag or commit {revision!r}", hint=hint, param="model")
        case errors.RepositoryNotFoundError():
            hint = "check the spelling; for a private model, set HF_TOKEN"
            return ModelNotFound(f"no model {name.repo!r} at {constants.ENDPOINT}", hint=hint, param="model")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            message = f"{constants.ENDPOINT} denies access to {name.repo} ({error.response.status_code})"
            return DownloadFailed(message, hint="check HF_TOKEN")
        case errors.HfHubHTTPError():
            message = f"{constants.ENDPOINT} returned status {error.response.status_code} for {name.repo}"
            return DownloadFailed(message, hint="try again later; completed files are kept")
        case _:
            message = f"cannot reach {constants.ENDPOINT}: {error or type(error).__name__}"
            return DownloadFailed(message, hint=RETRY_HINT)


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned deletion; `execute()` does it."""

    name: str
    frees: int  # bytes
    execute: Callable[[], None]


def plan_removal(name: str) -> Removal:
    """Plan to delete a repo (`org/repo`, complete or not) or one revision of it (`org/repo@revision`).

    Raises ModelNotFound if it is not in the cache, InvalidRequest for a malformed name.
    """
    if name == catalog.GUIDE:
        raise InvalidRequest(
            "guide is built in and cannot be deleted", hint="uninstall localllm to remove it", param="model"
        )
    target = parse(name)
    if not target.folder.is_dir():
        raise ModelNotFound(f"model {target.repo!r} is not in {paths.hub_cache_dir()}", hint="see localllm list")
    snapshots = list((target.folder / "snapshots").glob("*"))
    if not target.revision:
        folders = [target.folder, *_packed_outside(snapshots)]
        return Removal(target.repo, sum(map(_size, folders)), lambda: _remove(folders))
    from huggingface_hub import scan_cache_dir

    commits = {snapshot.name for snapshot in snapshots}
    commit = catalog.refs(target.folder).get(target.revision, target.revision)
    matching = [name for name in commits if catalog.is_commit(commit, name)]
    if len(matching) != 1:
        raise ModelNotFound(
            f"{target.repo} has no revision {target.revision!r} on this machine", hint="see localllm list --json"
        )
    plan = scan_cache_dir(paths.hub_cache_dir()).delete_revisions(matching[0])
    packed = _packed_outside([target.folder / "snapshots" / matching[0]])

    def execute() -> None:
        plan.execute()
        _remove(packed)

    return Removal(name, plan.expected_freed_size + sum(map(_size, packed)), execute)


def plan_packed_removal(name: str) -> Removal:
    """Plan to delete the cached quantised weights of a model. Raises ModelNotFound if there are none."""
    model = catalog.resolve(name, allow_path=True)
    folder = paths.packed_dir(model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"{model.id} has no cached quantised weights", hint="see localllm list")
    return Removal(f"the cached quantised weights of {model.id}", _size(folder), lambda: _remove([folder]))


def _packed_outside(snapshots: Sequence[Path]) -> list[Path]:
    """The folders of their cached quantised weights that are outside the snapshots."""
    folders = [paths.packed_dir(snapshot) for snapshot in snapshots]
    return [folder for folder in folders if folder.is_dir() and folder.parent not in snapshots]


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _size(folder: Path) -> int:
    """Bytes of its files, without links."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
