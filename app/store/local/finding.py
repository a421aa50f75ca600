"""The files on this machine that a name selects. A name may select several: a model, and an adapter beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ...errors import InvalidRequest, ModelNotFound
from .. import catalog, names
from ..names import GUIDE, FileAddress, HubName, LocalPath, ShortName, check_path, is_path
from ..selection import gguf_quant, selects_gguf
from . import ggufs, snapshots
from .ggufs import GgufModel
from .refs import ADAPTER_CONFIG, ModelRef, base_in, describe, has_safetensors, is_file, is_folder, kind_of

# Kind and completeness, the most useful first: a name without a selector prefers safetensors weights to GGUF models.
PREFERENCE = (
    ("model", True),
    ("gguf", True),
    ("adapter", True),
    ("model", False),
    ("gguf", False),
    ("weights", False),
)


def find_all(name: str, *, allow_path: bool = False) -> list[ModelRef]:
    """The files of a name in the order of PREFERENCE; empty for a name without files, and for a malformed name.

    With `allow_path`, the name may also be a folder or a GGUF file. Raises ModelNotFound for a path that is neither.
    """
    try:
        parsed = names.parse(name)
        target = catalog.expand(parsed) or parsed
    except InvalidRequest:
        if allow_path and is_path(name):
            raise
        return []
    if isinstance(target, LocalPath):
        return list(_at_path(target.path)) if allow_path or target is not parsed else []
    if isinstance(target, ShortName) and (builtin := _builtin(target)):
        return builtin
    found = _selected(_as_repository(target))
    return sorted(found, key=lambda ref: PREFERENCE.index((ref.kind, ref.is_complete)))


def find(name: str, *, allow_path: bool = False) -> ModelRef | None:
    """The files of a name; None without files, for a malformed name, and for a path that is no model."""
    try:
        return next(iter(find_all(name, allow_path=allow_path)), None)
    except (InvalidRequest, ModelNotFound):
        return None


def find_model(name: str, *, allow_path: bool = False) -> ModelRef | None:
    """The complete model of a name; None for other files and without files."""
    ref = find(name, allow_path=allow_path)
    return ref if ref is not None and ref.is_complete and ref.kind in ("model", "gguf") else None


def _builtin(name: ShortName) -> list[ModelRef]:
    """The built-in model or adapter of a name; empty for another name."""
    if name == ShortName(GUIDE):
        return snapshots.bundled()
    return [ref for ref in snapshots.builtin_adapters() if ref.id == str(name)]


def _as_repository(name: ShortName | HubName | FileAddress) -> HubName:
    match name:
        case ShortName():
            return HubName(name.family, name.revision, name.tag.upper())
        case FileAddress():
            return HubName(name.repo)
    return name


def _selected(name: HubName) -> Iterator[ModelRef]:
    """The files of a snapshot that a name selects."""
    commits = snapshots.commits_of(name.folder, name.revision)
    if len(commits) != 1:  # none, or a short commit of several
        return
    snapshot = name.folder / "snapshots" / commits[0]
    refs = list(snapshots.contents(snapshot, snapshots.snapshots(name.folder)[commits[0]]))
    if not selects_gguf(name):
        yield from (ref for ref in refs if not ref.is_gguf)
    chosen = [ggufs.select(name, models(snapshot)) for models in (ggufs.models_in, ggufs.adapters_in)]
    paths = [model.path for model in chosen if model is not None]
    yield from (ref for ref in refs if ref.path in paths)
    yield from (ref for ref in refs if not ref.is_complete and ref.is_gguf and _matches(name, ref))


def _matches(name: HubName, ref: ModelRef) -> bool:
    """Whether a name selects a GGUF model with missing shards."""
    if name.file:
        return PurePosixPath(name.file).name in {path.name for path in ref.weight_files}
    return name.quant in ("", gguf_quant(ref.path.name))


def _at_path(path: Path) -> Iterator[ModelRef]:
    """The files of a path. Only the names of files are read: a folder such as / may have millions of files.

    Raises ModelNotFound for a path that is no folder and no GGUF file, and for a folder with several GGUF models.
    """
    check_path(path)
    if ggufs.is_gguf(path) and is_file(path):
        yield _gguf_at(str(path), ggufs.model_of(path))
        return
    if not is_folder(path):
        hint = "the path of a model is a folder with config.json, or a file whose name ends in .gguf"
        problem = "is not a GGUF file" if is_file(path) else "does not exist"
        raise ModelNotFound(f"{str(path)[:200]} {problem}", hint=hint, param="model")
    if (path / "config.json").is_file():
        yield describe(str(path), path, files=path.glob("*"))
    if (path / ADAPTER_CONFIG).is_file() and has_safetensors(path):
        ref = describe(str(path), path, files=path.glob("*"), description=base_in(path))
        yield replace(ref, kind="adapter")
    elif not (path / "config.json").is_file():
        yield from _without_config(path)


def _without_config(folder: Path) -> Iterator[ModelRef]:
    """The only GGUF model in a folder, or its weight files."""
    models = ggufs.models_in(folder, deep=False)
    if len(models) == 1:
        yield _gguf_at(str(folder), models[0])
    elif any(file.suffix in names.WEIGHT_FILES for file in folder.glob("*")):
        yield ModelRef(str(folder), folder, kind_of(folder), is_complete=False)


def no_single_model(folder: Path) -> ModelNotFound:
    """The error about a folder without config.json that has several GGUF models, or none."""
    models = ggufs.models_in(folder, deep=False)
    if len(models) > 1:
        hint = f"name one of the files: {', '.join(model.path.name for model in models[:3])}"
        return ModelNotFound(f"{folder} has {len(models)} GGUF models", hint=hint, param="model")
    hint = "a model folder has config.json, tokenizer.json and *.safetensors, as on Hugging Face, or a GGUF file"
    return ModelNotFound(f"{folder} is not a model folder: config.json is missing", hint=hint, param="model")


def _gguf_at(name: str, model: GgufModel) -> ModelRef:
    check_path(model.path)
    description = f"GGUF {model.quant}".strip()
    kind = kind_of(model.path)
    return ModelRef(name, model.path, kind, model.is_complete, size=model.size, description=description)
