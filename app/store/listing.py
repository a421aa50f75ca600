"""The list of models for people: also damaged and incomplete models, with the problem, and unfinished downloads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec

from ...engine.errors import ModelRefused
from ...engine.files.gguf_model import parse_metadata
from ...engine.files.model_files import MODULES, ModelFiles, read_architecture
from ...engine.files.pooling import read_pooling
from ..chat.tokenizer import gguf_metadata
from ..chat.tokenizer.files import chat_templates, read_json
from ..paths import printable
from ..purpose import Purpose, purpose_of
from . import names
from .checks import architectures, tokenizer
from .checks.architectures import Facts
from .checks.files import check
from .checks.headers import read_gguf_file
from .local import snapshots, unfinished
from .local.finding import no_single_model
from .local.refs import ModelRef
from .local.unfinished import repair_of_missing
from .names import LOCAL
from .records import Kind, ListedModel
from .selection import NO_CONFIG

Examined = tuple[ModelRef, ListedModel]


def listed(*, wait: bool = False) -> list[ListedModel]:
    """Every model and unfinished download, the built-in model first. `problem` says why one cannot be used.

    A process asks the backends about architectures that no list had before. With `wait`, the list has its answers;
    without, the process runs in the background, and a later list has them.
    """
    return [entry for _, entry in examined(wait=wait)]


def examined(*, wait: bool = False) -> list[Examined]:
    """The files of each entry of the list, and the entry."""
    models = [(ref, entry_of(ref)) for ref in snapshots.bundled()]
    for folder in snapshots.repo_folders():
        models += _of_repository(folder)
    undecided = [ref.path for ref, entry in models if not entry.problem and _unanswered(ref)]
    if not wait:
        architectures.ask_in_background(undecided)
    answers = architectures.ask(undecided) if wait and undecided else {}
    replace = msgspec.structs.replace
    return [
        (ref, replace(entry, problem=answer.problem or None, install=answer.install))
        if (answer := answers.get(ref.path))
        else (ref, entry)
        for ref, entry in models
    ]


def _of_repository(folder: Path) -> list[Examined]:
    """The models of a repository, and the bytes that none of them has: without a model, an entry of their own."""
    models = [(ref, entry_of(ref)) for ref in snapshots.contents_of(folder) if _is_listed(ref)]
    size = unfinished.disk_bytes(folder)
    if not size:
        return models
    if not models:
        name = names.repo_of_folder(folder)
        ref = ModelRef(name, folder, "weights", is_complete=False, size=size)
        return [(ref, _entry(ref, unfinished.problem(name), _Checked()))]
    (ref, entry), *others = models
    return [(ref, msgspec.structs.replace(entry, unfinished=size)), *others]


def _is_listed(ref: ModelRef) -> bool:
    """False for adapters, and for weights that other programs have stored."""
    return ref.kind in ("model", "gguf") or (ref.kind == "weights" and ref.id.startswith(f"{LOCAL}/"))


def entry_of(ref: ModelRef) -> ListedModel:
    """The entry of a model, with its first problem. Reads no weights, and starts no process that asks the backends."""
    if not (ref.is_complete or ref.is_gguf):
        return _entry(ref, problems_of(ref)[0], _Checked())
    return _entry(ref, problem_of(ref), _check(ref))


def _entry(ref: ModelRef, problem: str, checked: _Checked) -> ListedModel:
    return ListedModel(
        id=ref.id,
        path=printable(ref.path),
        bundled=ref.bundled,
        revision=ref.revision,
        size=ref.size,
        packed=ref.packed,
        context=ref.context or checked.context,
        description=", ".join(filter(None, [checked.architecture, ref.description])),
        purpose=checked.purpose,
        problem=problem or None,
        install="" if checked.problem else architectures.install_command(checked.question),
        gguf=ref.is_gguf,
    )


def purpose(ref: ModelRef) -> Purpose:
    """The purpose of a model. Damaged files are those of a chat model: a load names the problem."""
    return _check(ref).purpose


def problems_of(ref: ModelRef) -> list[str]:
    """All problems of stored files. Reads headers; for a model, it may start a process that asks the backends."""
    if ref.kind == "weights":
        return [NO_CONFIG]
    if ref.kind == "model" and not ref.is_complete:
        return [_missing_files(ref.id)]
    if ref.kind == "gguf" and not ref.is_gguf:
        error = no_single_model(ref.path)
        return [f"{error}; {error.hint}"]
    return check(ref) or list(filter(None, [tokenizer.problem(ref.path) or problem_of(ref)]))


def problem_of(ref: ModelRef) -> str:
    """The reason why the files cannot be used; empty if they can. Reads headers, starts no process.

    An architecture about which no process has asked the backends is no problem.
    """
    checked = _check(ref)
    if checked.problem or ref.kind == "adapter":
        return checked.problem
    return tokenizer.remembered_problem(ref.path) or architectures.answer(checked.question) or ""


def _missing_files(name: str) -> str:
    problem = "imported files have moved or were deleted" if name.startswith(f"{LOCAL}/") else "files are missing"
    return f"{problem}; {repair_of_missing(name)}"


def _unanswered(ref: ModelRef) -> bool:
    """True if the backends have to be asked about the architecture of a model without another problem."""
    return architectures.answer(_check(ref).question) is None


def _version(ref: ModelRef) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the files that a check reads. A changed file is checked again."""
    versions = []
    with suppress(FileNotFoundError):  # another process may delete the folder now
        for file in _files_to_check(ref):
            status = file.stat()
            versions.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(versions))


def _files_to_check(ref: ModelRef) -> Iterator[Path]:
    if ref.is_gguf:
        yield from ref.weight_files
        return
    with os.scandir(ref.path) as entries:
        for entry in entries:
            if (entry.name.endswith(".json") or ".safetensors" in entry.name) and entry.is_file():
                yield Path(entry.path)


class _Checked(msgspec.Struct, frozen=True):
    """The result of a check of headers."""

    problem: str = ""
    question: str = ""  # see architectures.question
    architecture: str = ""  # of a GGUF model
    context: int = 0  # of a GGUF model, in tokens; 0: unknown
    purpose: Purpose = "chat"


def _check(ref: ModelRef) -> _Checked:
    return _checked(ref.path, ref.kind, _version(ref))


@lru_cache(maxsize=1000)
def _checked(path: Path, kind: Kind, version: tuple[object, ...]) -> _Checked:
    """`version`: that of the files, with which the result stays valid."""
    files = (str(path), *version)
    facts = architectures.remembered_facts(files)
    if facts is None:
        if problems := check(ModelRef(str(path), path, kind), ask_backends=False):
            return _Checked(problems[0])
        if kind == "adapter":
            return _Checked()
        if kind == "model":
            return _Checked(question=architectures.question(path), purpose=_purpose_of_folder(path))
        facts = _facts_of_gguf(path)
        architectures.remember_facts(files, facts)
    return _Checked("", architectures.question(path), facts.architecture, facts.context, facts.purpose)


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
