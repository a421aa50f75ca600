"""The models and adapters on this machine: the built-in ones, and those in the shared Hugging Face cache.

    models--org--repo/
        refs/main             a commit
        snapshots/<commit>/   links to files in blobs/; a link appears when its file is complete

This module reads the cache without huggingface_hub, because the import of huggingface_hub is slow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ... import paths
from .. import names
from ..names import GUIDE, MAIN
from . import ggufs
from .refs import ADAPTER_CONFIG, ModelRef, base_in, describe, describe_gguf, has_all_weights, has_safetensors

GUIDE_DESCRIPTION = "tiny built-in model: answers questions about localllm"
SHORTEST_COMMIT = 7
_COMMIT = re.compile(rf"[0-9a-f]{{{SHORTEST_COMMIT},}}")


def available() -> list[ModelRef]:
    """Every complete model, the built-in model first."""
    stored = [ref for folder in repo_folders() for ref in contents_of(folder)]
    return [*bundled(), *(ref for ref in stored if ref.kind in ("model", "gguf") and ref.is_complete)]


def adapters() -> list[ModelRef]:
    """The built-in adapters, then every complete adapter in the Hugging Face cache."""
    stored = [ref for folder in repo_folders() for ref in contents_of(folder)]
    return [*builtin_adapters(), *(ref for ref in stored if ref.kind == "adapter")]


def ids() -> list[str]:
    """The ids of all models, adapters and unfinished downloads on this machine."""
    complete = [ref.id for ref in (*available(), *adapters())]
    return list(dict.fromkeys([*complete, *map(names.repo_of_folder, repo_folders())]))


def bundled() -> list[ModelRef]:
    """The built-in model, if it is installed."""
    folder = paths.guide_dir()
    return [describe(GUIDE, folder, bundled=True, description=GUIDE_DESCRIPTION)] if has_all_weights(folder) else []


def builtin_adapters() -> list[ModelRef]:
    """The adapters that come with guide."""
    folders = sorted(filter(_is_adapter, paths.builtin_adapters_dir().glob("*")))
    refs = [describe(folder.name, folder, bundled=True, description=GUIDE) for folder in folders]
    return [replace(ref, kind="adapter") for ref in refs]


def repo_folders() -> list[Path]:
    """The folders of all repositories in the cache, in alphabetical order, without names that no hub has."""
    entries = paths.hub_cache_dir().glob("models--*")
    folders = [entry for entry in entries if names.is_repository(names.repo_of_folder(entry)) and entry.is_dir()]
    return sorted(folders, key=lambda folder: folder.name.lower())


def contents_of(repo_folder: Path) -> Iterator[ModelRef]:
    """All models and adapters in the snapshots of one repository, also those with missing files."""
    for commit, id in snapshots(repo_folder).items():
        yield from contents(repo_folder / "snapshots" / commit, id)


def contents(snapshot: Path, id: str) -> Iterator[ModelRef]:
    """The models and adapters in a snapshot. `id`: that of the snapshot."""
    ref = describe(id, snapshot, revision=snapshot.name)
    models = ggufs.models_in(snapshot)
    gguf_adapters = ggufs.adapters_in(snapshot)
    is_model = os.path.lexists(ref.file) and any(snapshot.glob("*.safetensors*"))
    is_adapter = _is_adapter(snapshot)
    if is_model:
        yield replace(ref, is_complete=has_all_weights(snapshot))
    for model in models:
        yield describe_gguf(ref, model, models)
    if is_adapter:
        yield replace(ref, kind="adapter", description=base_in(snapshot))
    for model in gguf_adapters:
        yield describe_gguf(ref, model, gguf_adapters, "adapter")
    if not (is_model or is_adapter or models or gguf_adapters) and _has_weights(snapshot):
        yield replace(ref, kind="weights", is_complete=False, description="weights")


def snapshots(repo_folder: Path) -> dict[str, str]:
    """Commit → id of the snapshots: `org/repo` for the branch main, `org/repo@revision` for the others.

    Every id selects its snapshot: a folder whose name is no commit, and a branch that no name can have, do not count.
    """
    repo = names.repo_of_folder(repo_folder)
    branches = refs(repo_folder).items()
    labels = {commit: name for name, commit in reversed(branches) if names.is_repository(f"{repo}@{name}")}
    folders = (folder.name for folder in (repo_folder / "snapshots").glob("*"))
    commits = sorted(name for name in folders if _COMMIT.fullmatch(name))
    named = {commit: labels.get(commit, commit[:12]) for commit in commits}
    return {commit: repo if label == MAIN else f"{repo}@{label}" for commit, label in named.items()}


def refs(repo_folder: Path) -> dict[str, str]:
    """Branch or tag -> commit of one repo in the cache, main first."""
    root = repo_folder / "refs"
    files = [file for file in root.rglob("*") if file.is_file()]
    commits = {str(file.relative_to(root)): file.read_text("ascii", "replace").strip() for file in files}
    return dict(sorted(commits.items(), key=lambda item: (item[0] != MAIN, item[0])))


def commits_of(repo_folder: Path, revision: str) -> list[str]:
    """The snapshots of a branch, a tag or a commit, which may be short; empty: of the branch main."""
    commit = refs(repo_folder).get(revision or MAIN, revision)
    return [name for name in snapshots(repo_folder) if is_commit(commit, name)]


def is_commit(revision: str, commit: str) -> bool:
    """True if `revision` is the commit, or a prefix of the commit with at least SHORTEST_COMMIT characters."""
    return len(revision) >= SHORTEST_COMMIT and commit.startswith(revision)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and has_safetensors(folder)


def _has_weights(folder: Path) -> bool:
    """True if the folder or a folder in it has a weight file. A dangling link is a missing file."""
    files = (file for place in ("", "*/") for suffix in names.WEIGHT_FILES for file in folder.glob(f"{place}*{suffix}"))
    return any(file.is_file() for file in files)
