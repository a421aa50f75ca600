"""The kind and the files of a name. Commands, API and terminal UI call this module, so their answers are equal.

    kind         as a model                          as an adapter
    model        its files                           WrongKind: chat with it
    adapter      WrongKind: load it for its base     its files
    weights      ModelUnusable: no complete model    ModelUnusable
    incomplete   ModelNotFound: pull it again        WrongKind: pull it again
    unfinished   ModelNotFound: continue the pull    AdapterNotFound: continue the pull
    missing      ModelNotFound: similar names        AdapterNotFound: similar names

app/purpose.py has the uses of a model.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import AdapterNotFound, AppError, InvalidRequest, ModelUnusable, WrongKind
from ..purpose import Use, check_use, completion
from . import adapters, listing, names
from .local import adapter_refs, cache, ggufs, stored, unfinished
from .local.cache import ModelRef
from .selection import NO_CONFIG

Kind = Literal["model", "adapter", "weights", "incomplete", "unfinished", "missing"]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A name, and its files on this machine."""

    name: str
    kind: Kind
    ref: ModelRef | None = None  # None: unfinished or missing


def find(name: str, *, allow_path: bool = False) -> Resolved:
    """What a name is. With `allow_path`, also a folder or a GGUF file. Reads configurations, not weights.

    Raises InvalidRequest for a path that is no text.
    """
    if model := cache.find(name, allow_path=allow_path):
        return Resolved(name, "model", model)
    if adapter := _find_adapter(name, allow_path):
        return Resolved(name, "adapter", adapter)
    if model := cache.find(name, complete=cache.has_model_files):
        return Resolved(name, "incomplete", model)
    if weights := stored.find_weights(name):
        return Resolved(name, "weights", weights)
    return Resolved(name, "unfinished" if unfinished.refusal(name) else "missing")


def _find_adapter(name: str, allow_path: bool) -> ModelRef | None:
    try:
        adapter = adapter_refs.resolve(name, allow_path=allow_path)
    except (AdapterNotFound, InvalidRequest):
        return None
    return adapter if cache.is_adapter(adapter.path) else None


def model(name: str, *, allow_path: bool = False) -> ModelRef:
    """The model of a name.

    Raises ModelNotFound, ModelUnusable, WrongKind, or InvalidRequest for a path that is no text.
    """
    resolved = find(name, allow_path=allow_path)
    if resolved.kind == "adapter" and resolved.ref is not None:
        raise _is_adapter(resolved.ref)
    if resolved.kind == "weights" and resolved.ref is not None:
        raise _are_weights(resolved.ref)
    return cache.resolve(name, allow_path=allow_path)  # raises the error about a missing model or file


def adapter(name: str, *, allow_path: bool = False) -> ModelRef:
    """The adapter of a name.

    Raises AdapterNotFound, WrongKind, ModelUnusable, or InvalidRequest for a path that is no text.

    The files of a folder that is no model are not read here.
    """
    resolved = find(name, allow_path=allow_path)
    if resolved.kind == "model" and resolved.ref is not None and not cache.is_adapter(resolved.ref.path):
        raise WrongKind(
            f"{resolved.ref.id} is a model, not an adapter", hint=_next_step(resolved.ref), param="lora_path"
        )
    if resolved.kind == "incomplete" and resolved.ref is not None:
        hint = cache.repair_of_missing(resolved.ref.id)
        raise WrongKind(
            f"{resolved.ref.id} is a model with missing files, not an adapter", hint=hint, param="lora_path"
        )
    if resolved.kind == "weights" and resolved.ref is not None:
        raise _are_weights(resolved.ref)
    if resolved.kind == "unfinished" and (error := unfinished.refusal(name)):
        raise AdapterNotFound(error.message, hint=error.hint, param="lora_path")
    return adapter_refs.resolve(name, allow_path=allow_path)


def check_purpose(name: str, use: Use) -> None:
    """Raises WrongKind if the files of a name are no model for this use. A name without files is no error here."""
    resolved = find(name, allow_path=True)
    if resolved.ref is None:
        return
    if resolved.kind == "adapter":
        raise _is_adapter(resolved.ref)
    if resolved.kind == "model":
        check_use(resolved.ref.id, listing.purpose(resolved.ref.path), use)


def outcome(ref: ModelRef, files: str) -> str:
    """The sentence about files that a download or an import has stored: the way to use them, or their problem.

    `files`: their size, for example.
    """
    if problem := use_of(ref)["problem"]:
        return f"{ref.id} is in {ref.path} ({files}); it cannot be used: {problem}"
    return f"{ref.id} is ready ({files}); {_next_step(ref)}"


def use_of(ref: ModelRef) -> dict[str, str | None]:
    """The same facts for JSON. `purpose`: None for an adapter; `problem`: None for files that can be used."""
    is_model = cache.is_complete(ref.path)
    problems = listing.problems_of(ref)
    return {
        "purpose": listing.purpose(ref.path) if is_model else None,
        "problem": problems[0] if problems else None,
    }


def _next_step(ref: ModelRef) -> str:
    if cache.is_adapter(ref.path) and not cache.is_complete(ref.path):
        return f"try: {_load_command(ref)}"
    match listing.purpose(ref.path):
        case "embedding":
            return "it is an embedding model: POST /v1/embeddings computes the vectors of texts"
        case "base":
            return f"it is a base model, which completes text; try: {completion(ref.id)}"
    return f"try: localllm chat {shlex.quote(ref.id)}"


def _is_adapter(ref: ModelRef) -> WrongKind:
    hint = f"load it for its base model: {_load_command(ref)}"
    return WrongKind(f"{ref.id} is an adapter, not a model", hint=hint, param="model")


def _load_command(ref: ModelRef) -> str:
    return f"localllm adapters load {shlex.quote(ref.id)} --model {base_argument(ref.path)}"


def base_argument(path: Path) -> str:
    """The base model of an adapter as an argument; MODEL if its files name none that a command takes."""
    base = adapters.base_of(path)
    try:
        names.parse(base)
    except InvalidRequest:
        return "MODEL"
    return shlex.quote(base)


def _are_weights(ref: ModelRef) -> AppError:
    """The error about weight files that are no complete model, such as a GGUF model with a missing shard."""
    if ggufs.files_in(ref.path):
        problem = "".join(listing.problems_of(ref)[:1])
        hint = cache.repair_of_missing(names.without_gguf(ref.id))
    else:
        problem = NO_CONFIG
        hint = f"localllm show {ref.id} lists its files; localllm rm {ref.id} deletes them"
    return ModelUnusable(f"{ref.id}: {problem}", hint=hint, param="model")
