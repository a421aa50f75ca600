"""The adapter folders on this machine, with the facts that a list shows. Reads the configurations, not the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...engine.files.adapter_files import AdapterFiles, read_adapter_header
from .checks.files import check
from .local import adapter_refs, cache, ggufs


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter on disk. `id` is its name in the model cache, or the path of a folder outside the cache."""

    id: str
    path: Path
    base: str  # name of the base model in the configuration; empty: unknown
    rank: int  # largest rank in the configuration; 0: unknown
    size: int  # bytes on disk
    bundled: bool = False


def folders(others: Iterable[Path] = ()) -> list[AdapterFolder]:
    """The built-in and the downloaded adapters, then the folders in `others` that are not among them."""
    listed = [_describe(ref.id, ref.path, ref.size, ref.bundled) for ref in adapter_refs.available()]
    paths = {folder.path for folder in listed}
    for path in others:
        if path not in paths:
            paths.add(path)
            listed.append(_describe(str(path), path, _bytes(path), bundled=False))
    return listed


def _describe(id: str, path: Path, size: int, bundled: bool) -> AdapterFolder:
    gguf = _read_gguf(path)
    rank = _rank(_configuration(path)) if gguf is None else gguf.rank
    return AdapterFolder(id, path, base_of(path), rank, size, bundled)


def base_of(folder: Path) -> str:
    """The name of the base model in the configuration of an adapter; empty if it has none."""
    gguf = _read_gguf(folder)
    if gguf is not None:
        return gguf.base
    values = _configuration(folder)
    base = values.get("base_model_name_or_path") or values.get("model")  # the fields of PEFT and of mlx-lm
    return base if isinstance(base, str) else ""


def _read_gguf(path: Path) -> AdapterFiles | None:
    """The header of a GGUF adapter; None for a folder, and for a damaged file: a load names the problem."""
    if not ggufs.is_gguf(path) or check(path):
        return None
    return read_adapter_header(path)


def _rank(values: dict[str, object]) -> int:
    patterns = values.get("rank_pattern")
    parameters = values.get("lora_parameters")
    ranks = [values.get("r")]
    if isinstance(patterns, dict):
        ranks += patterns.values()
    if isinstance(parameters, dict):
        ranks.append(parameters.get("rank"))
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


def _configuration(folder: Path) -> dict[str, object]:
    """The fields of adapter_config.json. It is empty for a malformed file: a load names the problem."""
    return cache.read_object(folder / cache.ADAPTER_CONFIG)


def _bytes(folder: Path) -> int:
    try:
        if folder.is_file():
            return folder.stat().st_size
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except OSError:
        return 0
