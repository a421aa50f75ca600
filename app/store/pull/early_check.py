"""Checks a model before its weights are downloaded: with the small files, and with the headers of the weights.

`localllm inspect` finds the same problems at the hub, because both check a skeleton of the repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....engine.errors import ModelRefused
from ....engine.files.config_files import CONFIG, CONFIG_FILES
from ....engine.files.gguf_names import gguf_hint
from ....engine.files.json_files import read_json
from ..checks import tokenizer
from ..checks.architectures import unsupported
from ..checks.files import check
from ..checks.skeleton import Fetch, skeleton
from ..checks.template import try_folder, try_gguf
from ..checks.tokenizer import TOKENIZER
from ..local.ggufs import is_gguf
from ..local.refs import read_ref
from ..remote import RemoteFile


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


def hint_of_problem(name: str, stored: Mapping[str, Path]) -> str:
    """The hint after a problem of the model `name`. `stored`: name → path of the files on this machine."""
    try:
        model_type = str(read_json(stored[CONFIG]).get("model_type")) if CONFIG in stored else ""
    except ModelRefused:
        model_type = ""
    return gguf_hint(name, model_type) or "pull another model"


@dataclass(frozen=True, slots=True)
class EarlyCheck:
    """The result of a check. Both fields are empty for a usable model."""

    problem: str = ""  # the first reason why it cannot be used
    template: str = ""  # the reason why its chat template fails


def check_headers(files: Sequence[RemoteFile], stored: Mapping[str, Path], fetch: Fetch) -> EarlyCheck:
    """Check a model, an adapter or a GGUF model at a hub.

    `files`: those of its download. Raises DownloadFailed, or ModelUnusable for headers that are too large.
    """
    gguf = next((file.name for file in files if is_gguf(Path(file.name))), "")
    try:
        with skeleton(files, fetch, stored) as folder:
            ref = read_ref(folder / gguf)
            if problem := "".join(check(ref)[:1]) or tokenizer.problem(folder):
                return EarlyCheck(problem)
            if ref.kind == "adapter":
                return EarlyCheck()
            verdict = try_gguf(folder / gguf) if gguf else try_folder(folder)
            return EarlyCheck(template=verdict.reason if verdict.status == "fails" else "")
    except ModelRefused as error:
        return EarlyCheck(str(error))


def _fetch_nothing(file: RemoteFile, offset: int, length: int) -> bytes:
    raise AssertionError(f"{file.name} is on this machine")
