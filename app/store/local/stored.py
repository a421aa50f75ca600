"""Stored files of every kind: models, adapters, GGUF models, and single weight files that no backend reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ...errors import AdapterNotFound, InvalidRequest, ModelNotFound
from .. import catalog, names, suggestions
from ..names import HubName, LocalPath, is_path
from ..selection import gguf_quant
from . import adapter_refs, cache, ggufs, unfinished
from .cache import ModelRef

Kind = Literal["model", "adapter", "gguf", "weights"]


def resolve(name: str) -> ModelRef:
    """The stored files of a name, also of a model with missing weights, or the folder of a path.

    Raises ModelNotFound, with similar names or the command that continues the download as its hint.
    """
    model = find(name, allow_path=True) or cache.find(name, complete=cache.has_model_files)
    if model is not None:
        return model
    if is_path(name):
        return cache.resolve(name, allow_path=True)  # raises the error about the folder
    error = unfinished.refusal(name)
    if error is not None:
        raise error
    message = f"no model and no adapter {name[:200]!r} is on this machine"
    raise ModelNotFound(message, hint=suggestions.hint_for_stored(name, ids()), param="model")


def find(name: str, *, allow_path: bool = False) -> ModelRef | None:
    """The stored files of a name; None if it is not on this machine, or the name is malformed."""
    model = cache.find(name, allow_path=allow_path)
    if model is not None:
        return model
    try:
        adapter = adapter_refs.resolve(name, allow_path=allow_path)
    except AdapterNotFound:
        return find_weights(name)
    has_files = cache.is_adapter(adapter.path) or _has_weights_directly(adapter.path)
    return adapter if has_files else None  # another folder, such as /, may have millions of files


def find_weights(name: str) -> ModelRef | None:
    """The snapshot of a name that has a weight file, which is no complete model; None without one.

    For example a GGUF model with missing shards, or one file of another host.
    """
    try:
        parsed = names.parse(name)
        target = catalog.expand(parsed) or parsed
    except InvalidRequest:
        return None
    if isinstance(target, LocalPath):
        return None
    if not isinstance(target, HubName):
        return cache.find_snapshot(target, has_weights)
    repository = replace(target, quant="", file="")
    if target.file:
        return cache.find_snapshot(repository, lambda folder: (folder / target.file).is_file())
    return cache.find_snapshot(repository, lambda folder: has_weights(folder, target.quant))


def kind_of(folder: Path) -> Kind:
    """The kind of the files in a folder, or of a GGUF file. `weights`: files without a configuration."""
    if ggufs.is_gguf(folder):
        return "adapter" if ggufs.is_adapter(folder) else "gguf"
    if (folder / "config.json").is_file():
        return "model"
    if cache.is_adapter(folder):
        return "adapter"
    return "gguf" if cache.has_gguf(folder) else "weights"


def has_weights(folder: Path, quant: str = "") -> bool:
    """True if the folder or a folder in it has a weight file. `quant`: only a GGUF file of this quantisation counts."""
    if quant:
        return any(gguf_quant(file.name) == quant for file in ggufs.files_in(folder))
    return any(any(_files(folder, suffix)) for suffix in names.WEIGHT_FILES)


def _has_weights_directly(folder: Path) -> bool:
    return any(file.suffix in names.WEIGHT_FILES for file in folder.glob("*"))


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    """The files with a suffix in a folder and in its folders. A dangling link is a missing file."""
    for place in ("", "*/"):
        for file in folder.glob(f"{place}*{suffix}"):
            if file.is_file():
                yield file


def ids() -> list[str]:
    """The ids of all models, adapters and unfinished downloads on this machine."""
    complete = [model.id for model in (*cache.available(), *adapter_refs.available())]
    repositories = [names.repo_of_folder(folder) for folder in cache.repo_folders()]
    return list(dict.fromkeys(complete + repositories))
