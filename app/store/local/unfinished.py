"""Repositories in the cache whose download or import has stopped before its end."""

from __future__ import annotations

from pathlib import Path

from ...errors import InvalidRequest, ModelNotFound
from .. import catalog, names
from ..names import LOCAL, LocalPath, ShortName
from .blobs import own_bytes, unused_blobs


def disk_bytes(folder: Path) -> int:
    """Bytes on disk of the files of one repository that no model has: unfinished files, and complete ones beside them.

    A file with holes is larger than its data.
    """
    return sum(map(own_bytes, unused_blobs(folder)))


def problem(repo: str) -> str:
    """The problem of a repository with only unfinished files, and the command that completes it."""
    if repo.startswith(f"{LOCAL}/"):
        return f"the import is not complete; run it again, or delete it with localllm rm {repo}"
    return f"the download is not complete; localllm pull {repo} continues it"


def repair_of_missing(model: str) -> str:
    """The command that completes a model with missing files. `model`: its id."""
    if model.startswith(f"{LOCAL}/"):
        return f"localllm rm {model}, then import the model again"
    return f"localllm pull {model} downloads them"


def refusal(text: str) -> ModelNotFound | None:
    """The error for the name of a repository with only unfinished files; None for all other names."""
    folder = _folder(text)
    if folder is None or not disk_bytes(folder) or _has_weights(folder):
        return None
    repo = names.repo_of_folder(folder)
    if repo.startswith(f"{LOCAL}/"):
        hint = f"run it again, or delete it with localllm rm {repo}"
        return ModelNotFound(f"the import of {repo} is not complete", hint=hint, param="model")
    hint = f"localllm pull {text} continues it; localllm rm {repo} deletes it"
    return ModelNotFound(f"the download of {repo} is not complete", hint=hint, param="model")


def _folder(text: str) -> Path | None:
    """The folder of the repository of a name in the cache; None for a malformed name and a path."""
    try:
        name = names.parse(text)
        target = catalog.expand(name) or name
    except InvalidRequest:
        return None
    if isinstance(target, LocalPath):
        return None
    return names.repo_folder(target.family) if isinstance(target, ShortName) else target.folder


def _has_weights(folder: Path) -> bool:
    """True if a snapshot has a weight file, also a dangling link."""
    return any(any((folder / "snapshots").glob(f"*/*{suffix}")) for suffix in names.WEIGHT_FILES)
