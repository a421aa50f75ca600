"""Opens a name for inspection: a folder or file on this machine, or the skeleton of a repository at a hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ModelNotFound, ModelUnusable
from .. import names
from ..checks.skeleton import skeleton
from ..hub.lookup import lookup
from ..hub.ranges import range_requests
from ..hub.targets import remote_name
from ..local import ggufs
from ..local.finding import find
from ..records import Variant
from ..remote import RemoteFile, Repository
from ..selection import gguf_quant, gguf_variants, select, small_files

SOURCES = {"hf": "Hugging Face", "ms": "ModelScope", "url": ""}


@dataclass(frozen=True, slots=True)
class Origin:
    """The facts about a model that its folder does not have."""

    name: str
    source: str
    local: bool = True
    licence: str = ""
    files: tuple[str, ...] = ()  # all files of the repository, also those that a download leaves out
    problem: str = ""  # the reason why a download of the repository is refused
    variants: tuple[Variant, ...] = ()  # the GGUF models of the repository


@contextmanager
def opened(name: str) -> Iterator[tuple[Path, Origin]]:
    """The folder or the weight file of a name, and its origin. A GGUF model has the path of its first shard.

    Raises ModelNotFound, ModelUnusable, InvalidRequest, DownloadFailed or ModelRefused.
    """
    local = _local(name)
    if local is not None:
        yield local
        return
    remote = remote_name(name)
    repository = lookup(remote)
    source = f"{SOURCES[repository.source]} {repository.name}@{repository.commit[:12]}"
    if isinstance(remote, names.FileAddress):
        source = f"file {remote}"
    files, problem = _selected(remote, repository)
    model = next((file for file in files if ggufs.is_gguf(Path(file.name))), None)
    quant = gguf_quant(model.name) if model is not None else ""
    origin = Origin(
        _id_of(remote, quant),
        source,
        local=False,
        licence=repository.licence,
        files=tuple(file.name for file in repository.files),
        problem=problem,
        variants=_variants(repository),
    )
    with range_requests() as fetch, skeleton(files, fetch) as folder:
        is_file = isinstance(remote, names.FileAddress)
        weights = files[0] if is_file else model
        yield (folder if weights is None else folder / weights.name), origin


def _selected(name: names.HubName | names.FileAddress, repository: Repository) -> tuple[Sequence[RemoteFile], str]:
    """The files to inspect, and the reason if a download is refused.

    These are the files of a download. Of a repository without usable weights, they are the small files. Raises
    ModelNotFound, ModelUnusable.
    """
    if isinstance(name, names.FileAddress):
        return repository.files, ""
    try:
        return select(name, repository.files).files, ""
    except ModelUnusable as error:
        small = small_files(repository.files)
        if name.quant or name.file or not small:
            raise
        return small, error.message


def _id_of(name: names.HubName | names.FileAddress, quant: str) -> str:
    """The name of a remote model. `quant`: that of a GGUF model, which a name without a selector has by default."""
    if isinstance(name, names.HubName) and quant and not name.file:
        return str(replace(name, quant=quant))
    return str(name)


def _variants(repository: Repository) -> tuple[Variant, ...]:
    return gguf_variants((file.name, file.size) for file in repository.files)


def _local(text: str) -> tuple[Path, Origin] | None:
    """The folder or the weight file of a name, and its origin; None if it is not on this machine."""
    name = names.parse(text)
    if isinstance(name, names.LocalPath):
        names.check_path(name.path)
        if not os.path.exists(name.path):  # noqa: PTH110 - Path.exists raises an error if the path is too long
            hint = "a path begins with /, ./, ../ or ~; other names are those of localllm list and localllm search"
            raise ModelNotFound(f"{str(name.path)[:200]} does not exist", hint=hint, param="model")
        return name.path, Origin(str(name.path), str(name.path))
    ref = find(text)
    if ref is None:
        return None
    files = ggufs.files_in(ref.folder) if ref.is_gguf else []
    return ref.path, Origin(ref.id, str(ref.path), variants=gguf_variants((file.name, file.size) for file in files))
