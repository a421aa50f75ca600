"""The adapters on this machine, with the facts that a list shows. Reads the configurations, not the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...engine.files.adapter_files import AdapterFiles, read_adapter_header
from ..paths import printable
from .checks.files import check
from .local import snapshots
from .local.refs import ADAPTER_CONFIG, ModelRef, base_in, read_object, read_ref
from .records import AdapterFolder


def folders(others: Iterable[Path] = ()) -> list[AdapterFolder]:
    """The built-in and the downloaded adapters, then the folders in `others` that are not among them."""
    refs = snapshots.adapters()
    listed = {ref.path for ref in refs}
    refs += [replace(read_ref(path), size=_bytes(path)) for path in dict.fromkeys(others) if path not in listed]
    return [_describe(ref) for ref in refs]


def _describe(ref: ModelRef) -> AdapterFolder:
    gguf = _read_gguf(ref)
    rank = _rank(read_object(ref.path / ADAPTER_CONFIG)) if gguf is None else gguf.rank
    path = printable(ref.path)
    return AdapterFolder(id=ref.id, path=path, base=base_of(ref), rank=rank, size=ref.size, bundled=ref.bundled)


def base_of(ref: ModelRef) -> str:
    """The name of the base model in the files of an adapter; empty if they name none."""
    gguf = _read_gguf(ref)
    return base_in(ref.path) if gguf is None else gguf.base


def _read_gguf(ref: ModelRef) -> AdapterFiles | None:
    """The header of a GGUF adapter; None for a folder, and for a damaged file: a load names the problem."""
    return None if not ref.is_gguf or check(ref) else read_adapter_header(ref.path)


def _rank(values: dict[str, object]) -> int:
    """The largest rank in adapter_config.json: fields of PEFT, and of mlx-lm."""
    patterns = values.get("rank_pattern")
    parameters = values.get("lora_parameters")
    ranks = [values.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    if isinstance(parameters, dict):
        ranks.append(parameters.get("rank"))
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


def _bytes(path: Path) -> int:
    try:
        files = [path] if path.is_file() else path.iterdir()
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        return 0
