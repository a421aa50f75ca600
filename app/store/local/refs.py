"""A model or an adapter on this machine: it knows its kind, its files, and whether one of them is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ....engine.errors import ModelRefused
from ....engine.files.json_files import read_json
from ....engine.files.weight_files import INDEXES
from ... import paths
from .. import names
from ..records import Kind
from . import ggufs
from .ggufs import GgufModel

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model or an adapter on disk."""

    id: str  # guide, org/repo, org/repo@revision, org/repo:QUANT or the path of a folder or of a GGUF file
    path: Path  # the folder with config.json; of a GGUF model or adapter: its file, or its first shard
    kind: Kind = "model"
    is_complete: bool = True  # False: a weight file is missing
    bundled: bool = False
    revision: str = ""  # commit of the snapshot; empty: not in the Hugging Face cache
    size: int = 0  # bytes on disk
    packed: int = 0  # bytes of cached quantised weights, which `size` does not include
    context: int = 0  # maximum context of the model in tokens; 0: unknown
    description: str = ""  # the base model, if this is an adapter in a folder

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file, of a model or of an adapter."""
        return ggufs.is_gguf(self.path)

    @property
    def file(self) -> Path:
        """The file that every model of this format has: config.json, or the first GGUF file."""
        return self.path if self.is_gguf else self.path / "config.json"

    @property
    def folder(self) -> Path:
        """The folder with all files: the snapshot of a repository, or a folder outside of the cache."""
        return ggufs.root_of(self.path) if self.is_gguf else self.path

    @property
    def repository(self) -> str:
        """The name of the repository in the cache; empty for files outside of it."""
        return names.repo_of_folder(self.folder.parent.parent) if self.revision else ""

    @property
    def weight_files(self) -> list[Path]:
        """The GGUF file, or the shards of its model; empty for a folder."""
        if not self.is_gguf:
            return []
        return [file.path for file in ggufs.model_of(self.path).files] if self.path.is_file() else [self.path]

    @property
    def files(self) -> list[tuple[str, Path]]:
        """Name and path of every file, without the files that localllm derives from them.

        A GGUF model has its shards; in the cache, also the texts that were downloaded with them.
        """
        if not self.is_gguf:
            files = [path for path in self.path.rglob("*") if not path.is_dir()]
            named = [(str(path.relative_to(self.path)), path) for path in files]
            return sorted(item for item in named if not item[0].startswith(".localllm"))
        files = self.weight_files
        if self.folder.parent.name == "snapshots":
            files += [file for file in self.folder.glob("*") if not (ggufs.is_gguf(file) or file.is_dir())]
        return sorted((str(file.relative_to(self.folder)), file) for file in files)


def kind_of(path: Path) -> Kind:
    """The kind of the files in a folder, or of a GGUF file. A dangling link counts as a file."""
    if ggufs.is_gguf(path):
        return "adapter" if ggufs.is_adapter(path) else "gguf"
    has_config = os.path.lexists(path / "config.json")
    if not has_config and (path / ADAPTER_CONFIG).exists():
        return "adapter"
    if not any(path.glob("*.safetensors")) and ggufs.files_in(path):
        return "gguf"
    return "model" if has_config else "weights"


def read_ref(path: Path, id: str = "") -> ModelRef:
    """The files of a path whose size nobody needs, such as a skeleton. `id`: the path if empty."""
    kind = kind_of(path)
    return ModelRef(id or str(path), path, kind, is_complete=kind != "model" or has_all_weights(path))


def has_all_weights(folder: Path) -> bool:
    """True if the folder has config.json and every weight file of the index. A dangling link is a missing file."""
    if not (folder / "config.json").is_file():
        return False
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if index is None:
        return has_safetensors(folder)
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        return False
    return all(isinstance(shard, str) and is_file(folder / shard) for shard in set(shards.values()))


def has_safetensors(folder: Path) -> bool:
    return any(file.is_file() for file in folder.glob("*.safetensors"))


def describe(
    name: str,
    folder: Path,
    *,
    bundled: bool = False,
    revision: str = "",
    description: str = "",
    files: Iterable[Path] | None = None,
) -> ModelRef:
    """The files of a folder. `files`: those that count for its size; None: all files of the folder."""
    config = read_object(folder / "config.json")
    packed = paths.packed_dir(folder)
    inside_packed = f"{packed}{os.sep}"
    return ModelRef(
        id=name,
        path=folder,
        bundled=bundled,
        revision=revision,
        size=_bytes(file for file in files or folder.rglob("*") if not str(file).startswith(inside_packed)),
        packed=_bytes(packed.glob("*")),
        context=_context(config),
        description=description or str(config.get("model_type", "")),
    )


def describe_gguf(snapshot: ModelRef, model: GgufModel, models: list[GgufModel], kind: Kind = "gguf") -> ModelRef:
    """A GGUF model or adapter of a snapshot. `models`: all GGUF models of the snapshot, including this one."""
    return replace(
        snapshot,
        id=ggufs.id_of(snapshot.id, model, models),
        path=model.path,
        kind=kind,
        is_complete=model.is_complete,
        size=model.size,
        packed=0,
        context=0,
        description=f"GGUF {model.quant}".strip() if kind == "gguf" else "",
    )


def base_in(folder: Path) -> str:
    """The base model in the configuration of an adapter folder: the field of PEFT, or of mlx-lm; empty without one."""
    values = read_object(folder / ADAPTER_CONFIG)
    base = values.get("base_model_name_or_path") or values.get("model")
    return base if isinstance(base, str) else ""


def read_object(file: Path) -> dict[str, object]:
    """The JSON object in a file. It is empty for a malformed file, so that a broken repo does not hide the others."""
    try:
        return dict(read_json(file))
    except ModelRefused:
        return {}


def is_file(path: Path) -> bool:
    """True for a file. A name that no file system allows is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """True for a folder. A path that is too long is none."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises an error if the path is too long


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _context(config: dict[str, object]) -> int:
    """The maximum context in config.json; a model with other inputs than text has it in text_config."""
    text = config.get("text_config")
    limits = text if isinstance(text, dict) else config
    context = limits.get("max_position_embeddings")
    return context if isinstance(context, int) else 0
