"""The list of models for people: also damaged and incomplete models, with the problem, and unfinished downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from . import architectures, cache, names, stored, unfinished
from .cache import ModelRef
from .check import check
from .names import LOCAL
from .selection import NO_CONFIG, NO_GGUF


def listed(*, wait: bool = False) -> list[ModelRef]:
    """Every model and unfinished download, the built-in model first. `problem` says why one cannot be used.

    A process asks the backends about architectures that no list had before. With `wait`, the list has its answers;
    without, the process runs in the background, and a later list has them.
    """
    models = [with_problem(model) for model in cache.bundled()]
    for folder in cache.repo_folders():
        repository = list(_models_of(folder))
        models += repository
        if not repository and (size := unfinished.disk_bytes(folder)):
            name = names.repo_of_folder(folder)
            models.append(ModelRef(id=name, path=folder, size=size, problem=unfinished.problem(name)))
    undecided = [model.path for model in models if not model.problem and _unanswered(model.path)]
    if not undecided:
        return models
    if not wait:
        architectures.ask_in_background(undecided)
        return models
    reasons = architectures.ask(undecided)
    return [replace(model, problem=model.problem or reasons.get(model.path, "")) for model in models]


def _missing_files(name: str) -> str:
    problem = "imported files have moved or were deleted" if name.startswith(f"{LOCAL}/") else "files are missing"
    return f"{problem}; {cache.repair_of_missing(name)}"


def with_problem(model: ModelRef) -> ModelRef:
    """The model with its first problem. Reads no weights and starts no process."""
    return replace(model, problem=problem_of(model.path))


def problems_of(model: ModelRef) -> list[str]:
    """All problems of stored files. Reads headers; for a model, it may start a process that asks the backends."""
    if cache.has_model_files(model.path) and not cache.is_complete(model.path):
        return [_missing_files(model.id)]
    if stored.kind_of(model.path) in ("model", "adapter"):
        return check(model.path)
    return [problem_of(model.path)]


def problem_of(folder: Path) -> str:
    """The reason why the files in a folder cannot be used; empty if they can. Reads headers, starts no process.

    An architecture about which no process has asked the backends is no problem.
    """
    match stored.kind_of(folder):
        case "gguf":
            return NO_GGUF
        case "weights":
            return NO_CONFIG
        case "adapter":
            return _checked(folder, _version(folder)).problem
        case "model":
            checked = _checked(folder, _version(folder))
            return checked.problem or architectures.answer(checked.question) or ""


def _unanswered(folder: Path) -> bool:
    """True if the backends have to be asked about the architecture of a model without another problem."""
    return architectures.answer(_checked(folder, _version(folder)).question) is None


def _models_of(folder: Path) -> Iterator[ModelRef]:
    """The models of one repository, without adapters and without snapshots that have no weights."""
    for model in cache.snapshots(folder, _is_listed):
        if cache.is_complete(model.path):
            yield with_problem(model)
        elif cache.has_model_files(model.path):
            yield replace(model, problem=_missing_files(model.id))
        else:
            yield replace(model, description=stored.kind_of(model.path), problem=problem_of(model.path))


def _is_listed(snapshot: Path) -> bool:
    """True for models, GGUF models, and weight files of other hosts. Other programs also store other weights."""
    if cache.has_model_files(snapshot) or stored.has_gguf(snapshot):
        return True
    is_local = snapshot.parent.parent.name.startswith(names.repo_folder(f"{LOCAL}/").name)
    return is_local and stored.has_weights(snapshot) and not cache.is_adapter(snapshot)


def _version(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that a check reads. A changed file is checked again."""
    versions = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # another process may delete the folder now
        for entry in entries:
            is_read = entry.name.endswith(".json") or ".safetensors" in entry.name
            if is_read and entry.is_file():
                status = entry.stat()
                versions.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(versions))


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of a check of headers."""

    problem: str = ""
    question: str = ""  # see architectures.question


@lru_cache(maxsize=1000)
def _checked(folder: Path, version: tuple[object, ...]) -> _Checked:
    problems = check(folder, ask_backends=False)
    if problems or not (folder / "config.json").exists():
        return _Checked(problem="".join(problems[:1]))
    return _Checked(question=architectures.question(folder))
