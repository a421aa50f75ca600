"""The border to Hugging Face: names, errors in our words, and removal from the shared cache."""

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
    """`org/repo@revision` taken apart."""

    repo: str
    revision: str  # branch, tag or commit; empty when the name gives none

    @property
    def folder(self) -> Path:
        """Where the shared cache keeps the repo."""
        return paths.hub_cache_dir() / f"models--{self.repo.replace('/', '--')}"


def parse(name: str) -> HubName:
    """Raises InvalidRequest for anything but org/repo with an optional @revision."""
    parts = catalog.NAME.fullmatch(name)
    if not parts or parts["repo"].count("/") != 1 or ".." in name:
        hint = "for example Qwen/Qwen3-0.6B, or Qwen/Qwen3-0.6B@main for one branch, tag or commit"
        raise InvalidRequest(f"{name!r} is not a model's name on Hugging Face (org/repo)", hint=hint, param="model")
    return HubName(parts["repo"], parts["revision"] or "")


@contextmanager
def translated(name: HubName) -> Iterator[None]:
    """Turns the hub library's errors, and the disk's, into ours."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.FileMetadataError) as error:
        raise _told(name, error) from error
    except errors.XetDownloadError as error:
        raise DownloadFailed(f"the download of {name.repo} broke off: {error}", hint=AGAIN) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space, or set HF_HOME to a larger disk; running it again continues"
            raise StorageFailed(f"the disk of {paths.hub_cache_dir()} is full", hint=hint) from error
        raise StorageFailed(f"cannot write the model cache: {error}") from error


AGAIN = "check the network and any proxy settings; running it again continues"


def _told(name: HubName, error: Exception) -> AppError:
    from huggingface_hub import constants, errors

    revision = name.revision or catalog.MAIN
    match error:
        case errors.OfflineModeIsEnabled():
            return DownloadFailed(f"cannot fetch {name.repo}: offline mode is on", hint="unset HF_HUB_OFFLINE")
        case errors.GatedRepoError():
            hint = "ask for access on its page, then set HF_TOKEN to a token of your account"
            return DownloadFailed(f"{name.repo} is gated: its owner has not given you access", hint=hint)
        case errors.RevisionNotFoundError():
            hint = "leave out @revision for the main branch"
            return ModelNotFound(f"{name.repo} has no branch, tag or commit {revision!r}", hint=hint, param="model")
        case errors.RepositoryNotFoundError():
            hint = "check the spelling; for a private one set HF_TOKEN"
            return ModelNotFound(f"no model {name.repo!r} at {constants.ENDPOINT}", hint=hint, param="model")
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            told = f"{constants.ENDPOINT} refuses access to {name.repo} ({error.response.status_code})"
            return DownloadFailed(told, hint="check HF_TOKEN")
        case errors.HfHubHTTPError():
            told = f"{constants.ENDPOINT} answered {error.response.status_code} for {name.repo}"
            return DownloadFailed(told, hint="try again later; what is here already is kept")
        case _:
            told = f"cannot reach {constants.ENDPOINT}: {error or type(error).__name__}"
            return DownloadFailed(told, hint=AGAIN)


@dataclass(frozen=True, slots=True)
class Removal:
    """What would be deleted; nothing is until `execute()`."""

    name: str
    frees: int  # bytes
    execute: Callable[[], None]


def plan_removal(name: str) -> Removal:
    """The whole repo for `org/repo`, whole or half-downloaded; one revision of it for `org/repo@revision`.

    Raises ModelNotFound when the cache has no such thing, InvalidRequest for a name that is not of the hub.
    """
    if name == catalog.GUIDE:
        raise InvalidRequest(
            "guide is built in and cannot be deleted", hint="it goes when localllm goes", param="model"
        )
    asked = parse(name)
    if not asked.folder.is_dir():
        raise ModelNotFound(f"no model {asked.repo!r} in {paths.hub_cache_dir()}", hint="see localllm list")
    snapshots = list((asked.folder / "snapshots").glob("*"))
    if not asked.revision:
        folders = [asked.folder, *_kept_apart(snapshots)]
        return Removal(asked.repo, sum(map(_size, folders)), lambda: _remove(folders))
    from huggingface_hub import scan_cache_dir

    here = {commit.name for commit in snapshots}
    commit = catalog.refs(asked.folder).get(asked.revision, asked.revision)
    matching = [known for known in here if catalog.is_commit(commit, known)]
    if len(matching) != 1:
        raise ModelNotFound(f"{asked.repo} has no revision {asked.revision!r} here", hint="see localllm list --json")
    plan = scan_cache_dir(paths.hub_cache_dir()).delete_revisions(matching[0])
    apart = _kept_apart([asked.folder / "snapshots" / matching[0]])

    def execute() -> None:
        plan.execute()
        _remove(apart)

    return Removal(name, plan.expected_freed_size + sum(map(_size, apart)), execute)


def plan_unpacking(name: str) -> Removal:
    """Weights of any model here that were made smaller on load and kept. Raises ModelNotFound where there are none."""
    model = catalog.resolve(name, allow_path=True)
    folder = paths.packed_dir(model.path)
    if not folder.is_dir():
        raise ModelNotFound(f"nothing is kept of {model.id} beside the model itself", hint="see localllm list")
    return Removal(f"what is kept of {model.id} in smaller weights", _size(folder), lambda: _remove([folder]))


def _kept_apart(snapshots: Sequence[Path]) -> list[Path]:
    """What is kept of them in smaller weights, where that does not lie in their own folders."""
    folders = [paths.packed_dir(snapshot) for snapshot in snapshots]
    return [folder for folder in folders if folder.is_dir() and folder.parent not in snapshots]


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _size(folder: Path) -> int:
    """Bytes of its files; links into it count once."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
