"""Opens a name for inspection: a folder or file on this machine, or the skeleton of a repository at a hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelNotFound, ModelUnusable
from . import catalog, names, stored
from .inspection import Variant
from .lookup import lookup
from .ranges import range_requests
from .remote import RemoteFile, Repository
from .selection import default_quant, gguf_quant, gguf_variants, select, small_files
from .skeleton import skeleton
from .targets import remote_name

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
    quant: str = ""  # the GGUF quantisation that the name selects; empty: none
    variants: tuple[Variant, ...] = ()  # the GGUF models of the repository


@contextmanager
def opened(name: str) -> Iterator[tuple[Path, Origin]]:
    """The folder or the weight file of a name, and its origin.

    Raises ModelNotFound, ModelUnusable, InvalidRequest, DownloadFailed or ModelRefused.
    """
    local = _local(names.parse(name))
    if local is not None:
        yield local
        return
    remote = remote_name(name)
    repository = lookup(remote)
    source = f"{SOURCES[repository.source]} {repository.name}@{repository.commit[:12]}"
    if isinstance(remote, names.FileAddress):
        source = f"file {remote}"
    files, problem = _selected(remote, repository)
    origin = Origin(
        str(remote),
        source,
        local=False,
        licence=repository.licence,
        files=tuple(file.name for file in repository.files),
        problem=problem,
        variants=_variants(repository),
    )
    with range_requests() as fetch, skeleton(files, fetch) as folder:
        yield (folder / files[0].name if isinstance(remote, names.FileAddress) else folder), origin


def _selected(name: names.HubName | names.FileAddress, repository: Repository) -> tuple[Sequence[RemoteFile], str]:
    """The files to inspect, and the reason if a download is refused.

    These are the files of a download. Of a repository with only GGUF files, they are the files of one quantisation. Of
    a repository without usable weights, they are the small files. Raises ModelNotFound, ModelUnusable.
    """
    if isinstance(name, names.FileAddress):
        return repository.files, ""
    try:
        return select(name, repository.files, gguf=True).files, ""
    except ModelUnusable as error:
        quant = default_quant(_variants(repository))
        if name.quant or name.file or not (quant or small_files(repository.files)):
            raise
        if not quant:
            return small_files(repository.files), error.message
        selected = names.HubName(name.repo, name.revision, quant, name.hub)
        return select(selected, repository.files, gguf=True).files, error.message


def _variants(repository: Repository) -> tuple[Variant, ...]:
    return gguf_variants((file.name, file.size) for file in repository.files)


def _local(name: names.Name) -> tuple[Path, Origin] | None:
    """The folder or the weight file of a name, and its origin; None if it is not on this machine."""
    if isinstance(name, names.LocalPath):
        if not os.path.exists(name.path):  # noqa: PTH110 - Path.exists raises an error if the path is too long
            hint = "a path begins with /, ./, ../ or ~; other names are those of localllm list and localllm search"
            raise ModelNotFound(f"{str(name.path)[:200]} does not exist", hint=hint, param="model")
        return name.path, Origin(str(name.path), str(name.path))
    ref = stored.find(str(name))
    if ref is None:
        return None
    target = catalog.expand(name)
    quant = ""
    if isinstance(target, names.HubName):
        if target.file and not (ref.path / target.file).is_file():
            return None  # the repository is stored, but not this file of it
        quant = target.quant or gguf_quant(target.file)
    return ref.path, Origin(f"{ref.id}:{quant}" if quant else ref.id, str(ref.path), quant=quant)
