"""Checks a model before its weights are downloaded: its small files are here, its weights are their headers.

`localllm inspect` finds the same problems at the hub, because both check a skeleton of the repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.configfiles import CONFIG_FILES
from ...engine.errors import ModelRefused
from .architectures import unsupported
from .check import TOKENIZER, check
from .ggufs import is_gguf
from .remote import RemoteFile
from .skeleton import Fetch, skeleton


def problem_without_headers(kind: str, names: Sequence[str], stored: Mapping[str, Path]) -> str:
    """The first problem that the names of the files and the configuration show; empty without one.

    `stored`: name → path of the files that are on this machine.
    """
    if kind != "model":
        return ""
    config = {name: path for name, path in stored.items() if name in CONFIG_FILES}
    try:
        with skeleton((), _fetch_nothing, config) as folder:
            problem = unsupported(folder)
    except ModelRefused as error:
        return str(error)
    return problem or ("" if TOKENIZER in names else f"{TOKENIZER} is missing")


def problem_with_headers(files: Sequence[RemoteFile], stored: Mapping[str, Path], fetch: Fetch) -> str:
    """The first problem of a model, an adapter or a GGUF model at a hub; empty without one.

    `files`: those of its download. Raises DownloadFailed, or ModelUnusable for headers that are too large.
    """
    gguf = next((file.name for file in files if is_gguf(Path(file.name))), "")
    try:
        with skeleton(files, fetch, stored) as folder:
            return "".join(check(folder / gguf)[:1])
    except ModelRefused as error:
        return str(error)


def _fetch_nothing(file: RemoteFile, offset: int, length: int) -> bytes:
    raise AssertionError(f"{file.name} is on this machine")
