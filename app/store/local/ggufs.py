"""The GGUF models in a folder on this machine, by the names of their files. Reads no header.

    snapshots/<commit>/m-Q8_0.gguf                      a model of one file
    snapshots/<commit>/Q4_K_M/m-00001-of-00002.gguf     the first shard of another model

The path of a GGUF model is the path of its file, or of its first shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from ....engine.files.gguf_shards import SUFFIX, missing_shards, stem_of
from ...errors import AppError
from ..names import LOCAL, MAIN, HubName, parse_hub
from ..selection import gguf_models, gguf_quant, select_gguf

FIRST_BYTES = 64 * 2**10  # bytes that are read of a file; writers put the type of the file first
# The metadata entry general.type = "adapter" as a GGUF file has it: key, type of the value, length, value.
ADAPTER_ENTRY = b"general.type" + (8).to_bytes(4, "little") + (7).to_bytes(8, "little") + b"adapter"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A GGUF file on this machine."""

    name: str  # path in the folder, with /
    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model of one file, or of several shards. Shards may be missing."""

    files: tuple[StoredFile, ...]  # in the order of the shards

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    @property
    def quant(self) -> str:
        """The quantisation in the name of the file; empty if there is none."""
        return gguf_quant(self.files[0].name)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def is_complete(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> list[str]:
        """The names of the missing shards."""
        return missing_shards([file.name for file in self.files])


def is_gguf(path: Path) -> bool:
    """True if the name of a path is that of a GGUF file."""
    return path.suffix.lower() == SUFFIX


def models_in(folder: Path, *, deep: bool = True) -> list[GgufModel]:
    """The GGUF models in a folder and in its subfolders, without adapters and projectors of images.

    Without `deep`, files in subfolders do not count.
    """
    files = [file for file in files_in(folder, deep=deep) if not is_adapter(file.path)]
    return [GgufModel(tuple(model)) for model in gguf_models(files)]


def adapters_in(folder: Path) -> list[GgufModel]:
    """The GGUF adapters in a folder and in its subfolders."""
    files = [file for file in files_in(folder) if is_adapter(file.path)]
    return [GgufModel((file,)) for file in files]


def model_of(path: Path) -> GgufModel:
    """The model of a GGUF file: the file, or all shards that are in its folder. `path`: a file that exists."""
    file = StoredFile(path.name, path, path.stat().st_size)
    siblings = [other for other in _files(path.parent.iterdir(), path.parent) if other.path != path]
    for model in gguf_models([file, *siblings]):
        if file in model:
            return GgufModel(tuple(model))
    return GgufModel((file,))  # the name is not that of a model


def name_of(path: Path) -> str:
    """The name of a GGUF file without its extension and without the number of its shard."""
    return stem_of(path.name)


def root_of(path: Path) -> Path:
    """The folder of a GGUF file: the snapshot of a repository in the cache, or the folder that has the file."""
    for folder in path.parents:
        if folder.parent.name == "snapshots":
            return folder
    return path.parent


def need_llamacpp(commands: Iterable[str]) -> str:
    """One line about all models that llama.cpp would run if it were installed; empty if there are none.

    `commands`: of each model, the command that installs llama.cpp; empty for a model that does not need it.
    """
    needed = [command for command in commands if command]
    if not needed:
        return ""
    subject = "1 GGUF model needs" if len(needed) == 1 else f"{len(needed)} GGUF models need"
    return f"{subject} llama.cpp: {needed[0]}"


def select(name: HubName, models: Iterable[GgufModel]) -> GgufModel | None:
    """The model that a name selects; None if there is none, if shards are missing, or if there are several."""
    by_path = {model.path: model for model in models}
    try:
        selected = select_gguf(name, [file for model in by_path.values() for file in model.files])
    except AppError:
        return None
    return by_path[selected[0].path]


def id_of(repository: str, model: GgufModel, models: Sequence[GgufModel]) -> str:
    """The name of a model, which selects it among all `models` of a snapshot. `repository`: the id of the snapshot."""
    if len(models) == 1 and (not model.quant or repository.startswith(f"{LOCAL}/")):
        return repository
    if model.quant and sum(other.quant == model.quant for other in models) == 1:
        return f"{repository}:{model.quant}"
    if "/" not in repository:  # a repository without an organisation has no address that `parse` accepts
        return repository
    name = parse_hub(repository)
    host = "modelscope.cn/models" if name.hub == "ms" else "huggingface.co"
    return f"https://{host}/{name.repo}/resolve/{name.revision or MAIN}/{quote(os.fsencode(model.files[0].name))}"


def files_in(folder: Path, *, deep: bool = True) -> list[StoredFile]:
    """The GGUF files in a folder and, with `deep`, in its subfolders. A dangling link is a missing file."""
    return list(_files([*folder.glob("*"), *(folder.glob("*/*") if deep else ())], folder))


def _files(paths: Iterable[Path], folder: Path) -> Iterator[StoredFile]:
    for path in sorted(paths):
        if is_gguf(path) and path.is_file():
            yield StoredFile(path.relative_to(folder).as_posix(), path, path.stat().st_size)


def is_adapter(file: Path) -> bool:
    """True for a GGUF file with an adapter. Searches the first bytes, and trusts nothing in them."""
    try:
        status = file.stat()
    except OSError:
        return False
    return _is_adapter(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1000)
def _is_adapter(file: Path, *version: int) -> bool:
    try:
        with file.open("rb") as stream:
            return ADAPTER_ENTRY in stream.read(FIRST_BYTES)
    except OSError:
        return False
