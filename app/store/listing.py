"""The list of models for people: also damaged and incomplete models, with the problem, and unfinished downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ...engine.errors import ModelRefused
from ...engine.files.gguf_model import parse_metadata
from ...engine.files.model_files import MODULES, ModelFiles, read_architecture
from ...engine.files.pooling import read_pooling
from ..chat.tokenizer import gguf_metadata
from ..chat.tokenizer.files import chat_templates, read_json
from ..errors import ModelNotFound
from ..purpose import Purpose, purpose_of
from . import names
from .checks import architectures, tokenizer
from .checks.architectures import Answer, Facts
from .checks.files import check
from .checks.headers import read_gguf_file
from .local import cache, ggufs, stored, unfinished
from .local.cache import ModelRef
from .local.stored import Kind
from .names import LOCAL
from .selection import NO_CONFIG


def listed(*, wait: bool = False) -> list[ModelRef]:
    """Every model and unfinished download, the built-in model first. `problem` says why one cannot be used.

    A process asks the backends about architectures that no list had before. With `wait`, the list has its answers;
    without, the process runs in the background, and a later list has them.
    """
    models = [with_problem(model) for model in cache.bundled()]
    for folder in cache.repo_folders():
        models += _with_unfinished(folder, list(_models_of(folder)))
    undecided = [model.path for model in models if not model.problem and _unanswered(model.path)]
    if not undecided:
        return models
    if not wait:
        architectures.ask_in_background(undecided)
        return models
    reasons = architectures.ask(undecided)
    return [_with_answer(model, reasons[model.path]) if model.path in reasons else model for model in models]


def _with_unfinished(folder: Path, models: list[ModelRef]) -> list[ModelRef]:
    """The models of a repository with the bytes that none of them has. These are a row of their own without a model."""
    size = unfinished.disk_bytes(folder)
    if not size:
        return models
    if models:
        return [replace(models[0], unfinished=size), *models[1:]]
    name = names.repo_of_folder(folder)
    return [ModelRef(id=name, path=folder, size=size, problem=unfinished.problem(name))]


def _with_answer(model: ModelRef, answer: Answer) -> ModelRef:
    return replace(model, problem=answer.problem, install=answer.install)


def _missing_files(name: str) -> str:
    problem = "imported files have moved or were deleted" if name.startswith(f"{LOCAL}/") else "files are missing"
    return f"{problem}; {cache.repair_of_missing(name)}"


def with_problem(model: ModelRef) -> ModelRef:
    """The model with its first problem; of a GGUF model, also with its context and its architecture.

    Reads no weights, and starts no process that asks the backends.
    """
    kind = stored.kind_of(model.path)
    checked = _checked(model.path, _version(model.path))
    problem = _first_problem(model.path, kind, checked)
    if kind != "gguf":
        return replace(model, problem=problem, purpose=checked.purpose)
    description = ", ".join(filter(None, [checked.architecture, model.description]))
    install = "" if checked.problem else architectures.install_command(checked.question)
    described = replace(model, context=checked.context, description=description, purpose=checked.purpose)
    return replace(described, problem=problem, install=install)


def purpose(path: Path) -> Purpose:
    """The purpose of a model: of a folder or a GGUF file. Damaged files are those of a chat model: a load names the
    problem."""
    return _checked(path, _version(path)).purpose


def problems_of(model: ModelRef) -> list[str]:
    """All problems of stored files. Reads headers; for a model, it may start a process that asks the backends."""
    if cache.has_model_files(model.path) and not cache.is_complete(model.path):
        return [_missing_files(model.id)]
    if stored.kind_of(model.path) == "weights":
        return [NO_CONFIG]
    return check(model.path) or list(filter(None, [tokenizer.problem(model.path) or problem_of(model.path)]))


def problem_of(folder: Path) -> str:
    """The reason why the files in a folder cannot be used; empty if they can. Reads headers, starts no process.

    An architecture about which no process has asked the backends is no problem.
    """
    return _first_problem(folder, stored.kind_of(folder), _checked(folder, _version(folder)))


def _first_problem(folder: Path, kind: Kind, checked: _Checked) -> str:
    match kind:
        case "weights":
            return NO_CONFIG
        case "adapter":
            return checked.problem
        case "model" | "gguf":
            reason = tokenizer.remembered_problem(folder)
            return checked.problem or reason or architectures.answer(checked.question) or ""
    return ""


def _unanswered(folder: Path) -> bool:
    """True if the backends have to be asked about the architecture of a model without another problem."""
    return architectures.answer(_checked(folder, _version(folder)).question) is None


def _models_of(folder: Path) -> Iterator[ModelRef]:
    """The models of one repository, without adapters and without snapshots that have no weights."""
    yield from map(with_problem, cache.gguf_models(folder))
    for model in cache.snapshots(folder, _is_listed):
        if cache.is_complete(model.path):
            yield with_problem(model)
        elif cache.has_model_files(model.path):
            yield replace(model, problem=_missing_files(model.id))
        else:
            yield replace(model, description="weights", problem=NO_CONFIG)


def _is_listed(snapshot: Path) -> bool:
    """True for models in a folder, and weight files of other hosts. Other programs also store other weights."""
    if cache.has_model_files(snapshot):
        return True
    if cache.has_gguf(snapshot) or cache.is_adapter(snapshot):
        return False
    is_local = snapshot.parent.parent.name.startswith(names.repo_folder(f"{LOCAL}/").name)
    return is_local and stored.has_weights(snapshot)


def _version(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that a check reads. A changed file is checked again."""
    if ggufs.is_gguf(folder):
        return _version_of_gguf(folder)
    versions = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:  # another process may delete the folder now
        for entry in entries:
            is_read = entry.name.endswith(".json") or ".safetensors" in entry.name
            if is_read and entry.is_file():
                status = entry.stat()
                versions.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(versions))


def _version_of_gguf(file: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the shards of a GGUF model; empty if another process has deleted it."""
    versions = []
    with suppress(FileNotFoundError):
        for shard in ggufs.model_of(file).files:
            status = shard.path.stat()
            versions.append((shard.name, status.st_size, status.st_mtime_ns))
    return tuple(versions)


@dataclass(frozen=True, slots=True)
class _Checked:
    """The result of a check of headers."""

    problem: str = ""
    question: str = ""  # see architectures.question
    architecture: str = ""  # of a GGUF model
    context: int = 0  # of a GGUF model, in tokens; 0: unknown
    purpose: Purpose = "chat"


def _no_single_model(folder: Path) -> str:
    """The problem of a folder whose GGUF files are several models, or no model."""
    try:
        cache.resolve(str(folder), allow_path=True)
    except ModelNotFound as error:
        return f"{error}; {error.hint}"
    return ""


@lru_cache(maxsize=1000)
def _checked(folder: Path, version: tuple[object, ...]) -> _Checked:
    files = (str(folder), *version)
    if facts := architectures.remembered_facts(files):
        return _Checked("", architectures.question(folder), facts.architecture, facts.context, facts.purpose)
    problems = check(folder, ask_backends=False)
    if not problems and stored.kind_of(folder) == "gguf":
        if folder.is_dir():
            return _Checked(problem=_no_single_model(folder))
        facts = _facts_of_gguf(folder)
        architectures.remember_facts(files, facts)
        return _Checked("", architectures.question(folder), facts.architecture, facts.context, facts.purpose)
    if problems or not (folder / "config.json").exists():
        return _Checked(problem="".join(problems[:1]))
    return _Checked(question=architectures.question(folder), purpose=_purpose_of_folder(folder))


def _facts_of_gguf(file: Path) -> Facts:
    metadata = read_gguf_file(file).metadata
    config = parse_metadata(metadata, file.name)
    files = ModelFiles(file, file.name, config, {}, (), {}, gguf=(file,), metadata=metadata)
    purpose = purpose_of(gguf_metadata.chat_templates(metadata), read_pooling(files))
    return Facts(config.model_type, config.max_positions, purpose)


def _purpose_of_folder(folder: Path) -> Purpose:
    try:
        templates = chat_templates(folder, read_json(folder / "tokenizer_config.json"))
        pooling = read_pooling(read_architecture(folder)) if (folder / MODULES).is_file() else None
    except ModelRefused:
        return "chat"
    return purpose_of(templates, pooling)
