"""The adapters on this machine: the built-in ones, and the complete ones in the shared Hugging Face cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ... import paths
from ...errors import AdapterNotFound, InvalidRequest
from .. import catalog, names, suggestions
from ..names import GUIDE, FileAddress, HubName, LocalPath, is_path
from . import cache, ggufs
from .cache import ADAPTER_CONFIG, ModelRef


def available() -> list[ModelRef]:
    """The built-in adapters, then every complete adapter in the Hugging Face cache.

    The description is the name of the base model.
    """
    refs = builtin()
    for folder in cache.repo_folders():
        for adapter in cache.snapshots(folder, cache.is_adapter):
            base = cache.read_object(adapter.path / ADAPTER_CONFIG).get("base_model_name_or_path")
            refs.append(replace(adapter, description=str(base or "")))
        refs += _gguf_adapters(folder)
    return refs


def _gguf_adapters(repo_folder: Path) -> Iterator[ModelRef]:
    for snapshot in cache.snapshots(repo_folder, cache.has_gguf):
        models = ggufs.adapters_in(snapshot.path)
        for model in models:
            yield replace(cache.describe_gguf(snapshot, model, models), description="")


def builtin() -> list[ModelRef]:
    """The adapters that come with guide."""
    folders = sorted(filter(cache.is_adapter, paths.builtin_adapters_dir().glob("*")))
    return [cache.describe(folder.name, folder, bundled=True, description=GUIDE) for folder in folders]


def resolve(name: str, *, allow_path: bool = False) -> ModelRef:
    """The adapter of this name. With `allow_path`, also a folder or a GGUF file (with a leading /, ./, ../ or ~).

    Raises AdapterNotFound, with similar names as its hint; InvalidRequest for a path that is no text. The files of a
    folder are not read here.
    """
    if allow_path and is_path(name):
        folder = Path(name).expanduser().absolute()
        names.check_path(folder)
        if not (cache.is_folder(folder) or (ggufs.is_gguf(folder) and cache.is_file(folder))):
            hint = f"an adapter is a folder with {ADAPTER_CONFIG}, or a GGUF file"
            raise AdapterNotFound(f"adapter folder {str(folder)[:200]} does not exist", hint=hint, param="lora_path")
        return ModelRef(id=str(folder), path=folder)
    adapter = {ref.id: ref for ref in builtin()}.get(name) or _find(name)
    if adapter is None:
        hint = suggestions.hint_for_adapter(name, [adapter.id for adapter in available()])
        raise AdapterNotFound(f"adapter {name[:200]!r} is not on this machine", hint=hint, param="lora_path")
    names.check_path(adapter.path)
    return adapter


def _find(name: str) -> ModelRef | None:
    try:
        parsed = names.parse(name)
    except InvalidRequest:
        return None
    match catalog.expand(parsed):
        case HubName(quant="", file="") as repository:
            peft = cache.cached(repository.folder, repository.revision, cache.is_adapter)
            return peft or cache.find_gguf(repository, ggufs.adapters_in)
        case HubName() | FileAddress() as target:
            return cache.find_gguf(target, ggufs.adapters_in)
        case LocalPath() as folder if not isinstance(parsed, LocalPath):  # an alias of a folder
            return ModelRef(id=folder.text, path=folder.path) if cache.is_adapter(folder.path) else None
    return None
