"""The models on this machine: the built-in one, and the complete ones in the shared Hugging Face cache.

    models--org--repo/
        refs/main             a commit
        snapshots/<commit>/   links to files in blobs/; a link appears when its file is complete

This module reads the cache without huggingface_hub, because the import of huggingface_hub is slow. adapter_refs has the
adapters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ....engine.errors import ModelRefused
from ....engine.files.json_files import read_json
from ... import paths
from ...errors import InvalidRequest, ModelNotFound
from ...purpose import Purpose
from .. import catalog, names, suggestions
from ..names import GUIDE, LOCAL, MAIN, FileAddress, HubName, LocalPath, ShortName, check_path, is_path
from . import ggufs, unfinished
from .ggufs import GgufModel

ADAPTER_CONFIG = "adapter_config.json"
GUIDE_DESCRIPTION = "tiny built-in model: answers questions about localllm"

SHORTEST_COMMIT = 7


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model or an adapter on disk."""

    id: str  # guide, org/repo, org/repo@revision, org/repo:QUANT or the path of a folder or of a GGUF file
    path: Path  # the folder with config.json; of a GGUF model: its file, or its first shard
    bundled: bool = False
    revision: str = ""  # commit of the snapshot; empty: not in the Hugging Face cache
    size: int = 0  # bytes on disk
    unfinished: int = 0  # bytes of its repository that no model has: those of an unfinished download, and unused files
    packed: int = 0  # bytes of cached quantised weights, which `size` does not include
    context: int = 0  # maximum context of the model in tokens; 0: unknown
    description: str = ""
    purpose: Purpose = "chat"  # where a list has checked it
    problem: str = ""  # the reason why it cannot be used, where a list has checked it (app/store/listing.py)
    install: str = ""  # the command that solves the problem, if that is a package that is not installed

    @property
    def file(self) -> Path:
        """The file that every model of this format has: config.json, or the first GGUF file."""
        return self.path if ggufs.is_gguf(self.path) else self.path / "config.json"


def available() -> list[ModelRef]:
    """Every complete model, the built-in model first."""
    models = bundled()
    for folder in repo_folders():
        models += snapshots(folder)
        models += [model for model in gguf_models(folder) if is_complete(model.path)]
    return models


def bundled() -> list[ModelRef]:
    """The built-in model, if it is installed."""
    return [_bundled()] if is_complete(paths.guide_dir()) else []


def repo_folders() -> list[Path]:
    """The folders of all repositories in the cache, in alphabetical order, without names that no hub has."""
    entries = paths.hub_cache_dir().glob("models--*")
    folders = [entry for entry in entries if names.is_repo_folder(entry) and entry.is_dir()]
    return sorted(folders, key=lambda folder: folder.name.lower())


def resolve(name: str, *, allow_path: bool = False) -> ModelRef:
    """The model of this name: guide, an alias, a short name, a repository. With `allow_path`, also a folder or a file.

    Raises ModelNotFound, with similar names or the command that downloads or completes the model as its hint, or
    InvalidRequest for a path that is no text.
    """
    if allow_path and is_path(name):
        return _from_path(Path(name).expanduser())
    model = find(name)
    if model is None:
        raise _not_found(name)
    check_path(model.path)
    return model


def _not_found(name: str) -> ModelNotFound:
    damaged = find(name, complete=has_model_files)
    if damaged is not None:
        return ModelNotFound(f"{damaged.id}: files are missing", hint=repair_of_missing(damaged.id), param="model")
    error = ModelNotFound(f"model {name[:200]!r} is not on this machine", hint=hint(name), param="model")
    return unfinished.refusal(name) or error


def repair_of_missing(model: str) -> str:
    """The command that completes a model with missing files. `model`: its id."""
    if model.startswith(f"{LOCAL}/"):
        return f"localllm rm {model}, then import the model again"
    return f"localllm pull {model} downloads them"


def find(name: str, *, allow_path: bool = False, complete: Callable[[Path], bool] | None = None) -> ModelRef | None:
    """The model of this name; None if it is not on this machine, or the name is malformed.

    A name without a quantisation prefers safetensors weights to GGUF models. `complete`: the test of a snapshot in the
    cache, is_complete by default.
    """
    try:
        parsed = names.parse(name)
        target = catalog.expand(parsed) or parsed
        if isinstance(target, LocalPath):
            return _from_path(target.path) if allow_path or target is not parsed else None
        return find_snapshot(target, complete or is_complete) or find_gguf(target)
    except (InvalidRequest, ModelNotFound):
        return None


def find_snapshot(name: names.Name, complete: Callable[[Path], bool]) -> ModelRef | None:
    """The snapshot of a name for which `complete` is true; None without one, and for the path of a folder."""
    match name:
        case ShortName(family=names.GUIDE, tag="", revision=""):
            return _bundled() if is_complete(paths.guide_dir()) else None
        case ShortName(tag=""):
            return cached(names.repo_folder(name.family), name.revision, complete)
        case HubName(quant=""):
            return None if ggufs.is_gguf(Path(name.file)) else cached(name.folder, name.revision, complete)
        case FileAddress():
            return cached(name.folder, "", complete)
    return None


def find_gguf(name: names.Name, models_in: Callable[[Path], list[GgufModel]] = ggufs.models_in) -> ModelRef | None:
    """The complete GGUF model that a name selects; None without one, or if the name selects several.

    `models_in`: lists the candidates of a snapshot.
    """
    match name:
        case ShortName():
            target = HubName(name.family, name.revision, name.tag.upper())
        case HubName():
            target = name
        case FileAddress():
            target = HubName(name.repo)
        case _:
            return None
    snapshot = cached(target.folder, target.revision, has_gguf)
    if snapshot is None:
        return None
    models = models_in(snapshot.path)
    selected = ggufs.select(target, models)
    return None if selected is None else describe_gguf(snapshot, selected, models)


def gguf_models(repo_folder: Path) -> Iterator[ModelRef]:
    """The GGUF models in the snapshots of one repository, also those with missing shards."""
    for snapshot in snapshots(repo_folder, has_gguf):
        models = ggufs.models_in(snapshot.path)
        for model in models:
            yield describe_gguf(snapshot, model, models)


def find_file(repo_folder: Path, file: Path) -> ModelRef | None:
    """The GGUF model or adapter in a repository that has this file; None without one."""
    for snapshot in snapshots(repo_folder, has_gguf):
        for models in (ggufs.models_in(snapshot.path), ggufs.adapters_in(snapshot.path)):
            for model in models:
                if file in {stored.path for stored in model.files}:
                    return describe_gguf(snapshot, model, models)
    return None


def has_gguf(snapshot: Path) -> bool:
    """True if a snapshot has a GGUF file."""
    return bool(ggufs.files_in(snapshot))


def describe_gguf(snapshot: ModelRef, model: GgufModel, models: list[GgufModel]) -> ModelRef:
    """A GGUF model or adapter of a snapshot. `models`: all of the snapshot, of which this is one."""
    description = f"GGUF {model.quant}".strip()
    id = ggufs.id_of(snapshot.id, model, models)
    return replace(snapshot, id=id, path=model.path, size=model.size, packed=0, context=0, description=description)


def is_adapter(folder: Path) -> bool:
    """True if the folder has adapter_config.json and safetensors weights. A dangling link is a missing file.

    A path of a file is that of a GGUF adapter, or of something else.
    """
    if ggufs.is_gguf(folder):
        return ggufs.is_adapter(folder)
    return (folder / ADAPTER_CONFIG).is_file() and any(file.is_file() for file in folder.glob("*.safetensors"))


def is_commit(revision: str, commit: str) -> bool:
    """True if `revision` is the commit, or a prefix of the commit with at least SHORTEST_COMMIT characters."""
    return len(revision) >= SHORTEST_COMMIT and commit.startswith(revision)


def is_complete(folder: Path) -> bool:
    """True if the folder has config.json and every weight file of the index. A dangling link is a missing file.

    The path of a GGUF model is complete if all its shards exist.
    """
    if ggufs.is_gguf(folder) and is_file(folder):
        return ggufs.model_of(folder).is_complete and not ggufs.is_adapter(folder)
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(file.is_file() for file in folder.glob("*.safetensors"))
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        return False
    return all(isinstance(shard, str) and is_file(folder / shard) for shard in set(weight_map.values()))


def has_model_files(snapshot: Path) -> bool:
    """True if a snapshot has the configuration of a model and a weight file of any format, also a dangling link."""
    is_model = (snapshot / "config.json").is_symlink() or (snapshot / "config.json").is_file()
    return is_model and any(snapshot.glob("*.safetensors*"))


def repository_of(model: ModelRef) -> str:
    """The name of the repository of a model in the cache; empty for another model."""
    if not model.revision:
        return ""
    snapshot = ggufs.root_of(model.path) if ggufs.is_gguf(model.path) else model.path
    return names.repo_of_folder(snapshot.parent.parent)


def refs(repo_folder: Path) -> dict[str, str]:
    """Branch or tag -> commit of one repo in the cache, main first."""
    root = repo_folder / "refs"
    commits = {}
    for file in root.rglob("*"):
        if file.is_file():
            commits[str(file.relative_to(root))] = file.read_text("ascii", "replace").strip()
    return dict(sorted(commits.items(), key=lambda item: (item[0] != MAIN, item[0])))


def _bundled() -> ModelRef:
    return describe(GUIDE, paths.guide_dir(), bundled=True, description=GUIDE_DESCRIPTION)


def cached(folder: Path, revision: str, complete: Callable[[Path], bool] = is_complete) -> ModelRef | None:
    """The model or adapter in a folder of the cache; None if it is missing, or a short commit matches several."""
    revision = revision or MAIN
    commit = refs(folder).get(revision, revision)
    models = [model for model in snapshots(folder, complete) if is_commit(commit, model.revision)]
    return models[0] if len(models) == 1 else None


def snapshots(repo_folder: Path, complete: Callable[[Path], bool] = is_complete) -> Iterator[ModelRef]:
    """The complete snapshots of one repo. Ids: `org/repo` for the branch main, `org/repo@revision` for the others."""
    repo = names.repo_of_folder(repo_folder)
    labels = {commit: name for name, commit in reversed(refs(repo_folder).items())}
    for snapshot in sorted((repo_folder / "snapshots").glob("*")):
        if complete(snapshot):
            label = labels.get(snapshot.name, snapshot.name[:12])
            yield describe(repo if label == MAIN else f"{repo}@{label}", snapshot, revision=snapshot.name)


def is_file(path: Path) -> bool:
    """True for a file. A name that no file system allows is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file system allows
        return False


def is_folder(path: Path) -> bool:
    """True for a folder. A path that is too long is none."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises an error if the path is too long


def _from_path(folder: Path) -> ModelRef:
    folder = folder.absolute()
    check_path(folder)
    if ggufs.is_gguf(folder) and is_file(folder):
        return _from_gguf(str(folder), ggufs.model_of(folder))
    if not is_folder(folder):
        hint = "the path of a model is a folder with config.json, or a file whose name ends in .gguf"
        problem = "is not a GGUF file" if is_file(folder) else "does not exist"
        raise ModelNotFound(f"{str(folder)[:200]} {problem}", hint=hint, param="model")
    if not (folder / "config.json").is_file():
        return _from_gguf_folder(folder)
    return describe(str(folder), folder, files=folder.glob("*"))  # without subfolders: a path such as / has too many


def _from_gguf(name: str, model: GgufModel) -> ModelRef:
    check_path(model.path)
    if not model.is_complete:
        missing = ", ".join(model.missing[:3])
        hint = f"copy all shards to {model.path.parent}"
        raise ModelNotFound(f"{name[:200]}: shards are missing: {missing}", hint=hint, param="model")
    if ggufs.is_adapter(model.path):
        raise ModelNotFound(f"{name[:200]} is an adapter", hint=f"localllm adapters load {name}", param="model")
    return ModelRef(id=name, path=model.path, size=model.size, description=f"GGUF {model.quant}".strip())


def _from_gguf_folder(folder: Path) -> ModelRef:
    """The only GGUF model in a folder without config.json. Raises ModelNotFound if there are several, or none."""
    models = ggufs.models_in(folder, deep=False)
    if len(models) == 1:
        return _from_gguf(str(folder), models[0])
    if models:
        files = ", ".join(model.path.name for model in models[:3])
        hint = f"name one of the files: {files}"
        raise ModelNotFound(f"{folder} has {len(models)} GGUF models", hint=hint, param="model")
    hint = "a model folder has config.json, tokenizer.json and *.safetensors, as on Hugging Face, or a GGUF file"
    raise ModelNotFound(f"{folder} is not a model folder: config.json is missing", hint=hint, param="model")


def describe(
    name: str,
    folder: Path,
    *,
    bundled: bool = False,
    revision: str = "",
    description: str = "",
    files: Iterable[Path] | None = None,
) -> ModelRef:
    """The model or the adapter in a folder. `files`: those that count for its size; None: all files of the folder."""
    config = read_object(folder / "config.json")
    packed = paths.packed_dir(folder)
    inside_packed = f"{packed}{os.sep}"
    files_of_model = [file for file in files or folder.rglob("*") if not str(file).startswith(inside_packed)]
    return ModelRef(
        id=name,
        path=folder,
        bundled=bundled,
        revision=revision,
        size=_bytes(files_of_model),
        packed=_bytes(packed.glob("*")),
        context=_context(config),
        description=description or str(config.get("model_type", "")),
    )


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _context(config: dict[str, object]) -> int:
    """The maximum context in config.json; a model with other inputs than text has it in text_config."""
    text = config.get("text_config")
    limits = text if isinstance(text, dict) else config
    context = limits.get("max_position_embeddings")
    return context if isinstance(context, int) else 0


def read_object(file: Path) -> dict[str, object]:
    """The JSON object in a file. It is empty for a malformed file, so that a broken repo does not hide the others."""
    try:
        return dict(read_json(file))
    except ModelRefused:
        return {}


def hint(name: str) -> str:
    """The hint about a model that is not on this machine: the names that the user may mean, or the way to get it."""
    return suggestions.hint(name, [model.id for model in available()])
