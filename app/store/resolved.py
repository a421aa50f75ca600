"""The files of a name, as a model or as an adapter, or the error. Commands, API and terminal UI call this module, so
their answers are equal.

    kind                     as a model                          as an adapter
    model, gguf              its files                           WrongKind: chat with it
    adapter                  WrongKind: load it for its base     its files
    weights, gguf: no shard  ModelUnusable: no complete model    ModelUnusable
    model: missing files     ModelNotFound: pull it again        WrongKind: pull it again
    unfinished download      ModelNotFound: continue the pull    AdapterNotFound: continue the pull
    no files                 ModelNotFound: similar names        AdapterNotFound: similar names

app/purpose.py has the uses of a model.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ..errors import AdapterNotFound, AppError, InvalidRequest, ModelNotFound, ModelUnusable, WrongKind
from ..purpose import Use, check_use, completion
from . import adapters, listing, names, suggestions
from .local import ggufs, snapshots, unfinished
from .local.finding import find, find_all, no_single_model
from .local.refs import ADAPTER_CONFIG, ModelRef, is_file, is_folder
from .local.unfinished import repair_of_missing
from .names import check_path, is_path
from .records import Usable
from .selection import NO_CONFIG


def model(name: str, *, allow_path: bool = False) -> ModelRef:
    """The model of a name. With `allow_path`, also of a folder or a GGUF file. Reads configurations, not weights.

    Raises ModelNotFound, ModelUnusable, WrongKind, or InvalidRequest for a path that is no text.
    """
    ref = _first(name, allow_path)
    if ref is None:
        raise unfinished.refusal(name) or _no_model(name, allow_path)
    if ref.kind == "adapter":
        raise _is_adapter(ref)
    if not ref.is_complete:
        raise _no_model(name, allow_path) if ref.kind == "weights" and not ref.revision else _incomplete(ref)
    check_path(ref.path)
    return ref


def adapter(name: str, *, allow_path: bool = False) -> ModelRef:
    """The adapter of a name. With `allow_path`, also a folder, whose files are not read here, or a GGUF file.

    Raises AdapterNotFound, WrongKind or ModelUnusable.
    """
    try:
        refs = _found(name, allow_path)
    except InvalidRequest as malformed:
        raise AdapterNotFound(malformed.message, hint=malformed.hint, param="lora_path") from None
    for ref in refs:
        if ref.kind == "adapter":
            check_path(ref.path)
            return ref
    is_folder_name = allow_path and is_path(name)
    if refs and (refs[0].kind != "weights" or not is_folder_name):
        raise _no_adapter(refs[0])
    if is_folder_name:
        return _adapter_folder(Path(name).expanduser().absolute())
    if error := unfinished.refusal(name):
        raise AdapterNotFound(error.message, hint=error.hint, param="lora_path")
    hint = suggestions.hint_for_adapter(name, [ref.id for ref in snapshots.adapters()])
    raise AdapterNotFound(f"adapter {name[:200]!r} is not on this machine", hint=hint, param="lora_path")


def stored(name: str) -> ModelRef:
    """The stored files of a name, of every kind and also with missing files, or those of a path.

    Raises ModelNotFound, with similar names or the command that continues the download as its hint.
    """
    if ref := _first(name, allow_path=True):
        return ref
    if is_path(name):
        raise _no_model(name, allow_path=True)
    message = f"no model and no adapter {name[:200]!r} is on this machine"
    hint = suggestions.hint_for_stored(name, snapshots.ids())
    raise unfinished.refusal(name) or ModelNotFound(message, hint=hint, param="model")


def check_purpose(name: str, use: Use) -> None:
    """Raises WrongKind if the files of a name are no model for this use. A name without files is no error here."""
    ref = find(name, allow_path=True)
    if ref is None:
        return
    if ref.kind == "adapter":
        raise _is_adapter(ref)
    if ref.is_complete:
        check_use(ref.id, listing.purpose(ref), use)


def outcome(ref: ModelRef, files: str) -> str:
    """The sentence about files that a download or an import has stored: the way to use them, or their problem.

    `files`: their size, for example.
    """
    if problem := use_of(ref).problem:
        return f"{ref.id} is in {ref.path} ({files}); it cannot be used: {problem}"
    return f"{ref.id} is ready ({files}); {next_step(ref)}"


def use_of(ref: ModelRef) -> Usable:
    """The same facts for JSON."""
    is_model = ref.is_complete and ref.kind in ("model", "gguf")
    problems = listing.problems_of(ref)
    return Usable(listing.purpose(ref) if is_model else None, problems[0] if problems else None)


def next_step(ref: ModelRef) -> str:
    """The way to use files of a model or an adapter."""
    if ref.kind == "adapter":
        return f"try: {_load_command(ref)}"
    match listing.purpose(ref):
        case "embedding":
            return "it is an embedding model: POST /v1/embeddings computes the vectors of texts"
        case "base":
            return f"it is a base model, which completes text; try: {completion(ref.id)}"
    return f"try: localllm chat {shlex.quote(ref.id)}"


def base_argument(ref: ModelRef) -> str:
    """The base model of an adapter as an argument; MODEL if its files name none that a command takes."""
    base = adapters.base_of(ref)
    try:
        names.parse(base)
    except InvalidRequest:
        return "MODEL"
    return shlex.quote(base)


def _first(name: str, allow_path: bool) -> ModelRef | None:
    return next(iter(find_all(name, allow_path=allow_path)), None)


def _found(name: str, allow_path: bool) -> list[ModelRef]:
    try:
        return find_all(name, allow_path=allow_path)
    except ModelNotFound:
        return []


def _no_model(name: str, allow_path: bool) -> ModelNotFound:
    if allow_path and is_path(name):
        return no_single_model(Path(name).expanduser().absolute())
    hint = suggestions.hint(name, [ref.id for ref in snapshots.available()])
    return ModelNotFound(f"model {name[:200]!r} is not on this machine", hint=hint, param="model")


def _incomplete(ref: ModelRef) -> AppError:
    """The error about a model with missing files, and about weight files that are no complete model."""
    if not (ref.is_gguf or ref.revision):
        return no_single_model(ref.path)
    if not ref.revision:
        missing = ", ".join(ggufs.model_of(ref.path).missing[:3])
        hint = f"copy all shards to {ref.path.parent}"
        return ModelNotFound(f"{ref.id[:200]}: shards are missing: {missing}", hint=hint, param="model")
    if ref.kind == "model":
        return ModelNotFound(f"{ref.id}: files are missing", hint=repair_of_missing(ref.id), param="model")
    if ref.kind == "gguf":
        problem = "".join(listing.problems_of(ref)[:1])
        return ModelUnusable(f"{ref.id}: {problem}", hint=repair_of_missing(names.without_gguf(ref.id)), param="model")
    hint = f"localllm show {ref.id} lists its files; localllm rm {ref.id} deletes them"
    return ModelUnusable(f"{ref.id}: {NO_CONFIG}", hint=hint, param="model")


def _is_adapter(ref: ModelRef) -> WrongKind:
    hint = f"load it for its base model: {_load_command(ref)}"
    return WrongKind(f"{ref.id} is an adapter, not a model", hint=hint, param="model")


def _no_adapter(ref: ModelRef) -> AppError:
    """The error about a model in the place of an adapter."""
    if ref.is_complete:
        return WrongKind(f"{ref.id} is a model, not an adapter", hint=next_step(ref), param="lora_path")
    if ref.kind == "model":
        message = f"{ref.id} is a model with missing files, not an adapter"
        return WrongKind(message, hint=repair_of_missing(ref.id), param="lora_path")
    return _incomplete(ref)


def _adapter_folder(path: Path) -> ModelRef:
    if not is_folder(path) and not is_file(path):
        hint = f"an adapter is a folder with {ADAPTER_CONFIG}, or a GGUF file"
        raise AdapterNotFound(f"adapter folder {str(path)[:200]} does not exist", hint=hint, param="lora_path")
    return ModelRef(str(path), path, "adapter", is_complete=False)


def _load_command(ref: ModelRef) -> str:
    return f"localllm adapters load {shlex.quote(ref.id)} --model {base_argument(ref)}"
