"""`localllm list` and `rm`."""

from __future__ import annotations

from .. import config
from ..sizes import size
from ..store.local import adapter_refs, cache
from ..store.local.ggufs import need_llamacpp
from .console import print_json, say, table
from .removal import carry_out


def list_models(as_json: bool) -> int:
    """Print the models on this machine."""
    config.load()
    from ..store import listing

    models = listing.listed(wait=True)
    if as_json:
        print_json([_for_json(model) for model in models])
    else:
        _print(models)
    return 0


def _for_json(model: cache.ModelRef) -> dict[str, object]:
    return {
        "id": model.id,
        "bundled": model.bundled,
        "size": model.size,
        "unfinished": model.unfinished,
        "packed": model.packed,
        "context": model.context,
        "revision": model.revision,
        "path": str(model.path),
        "description": model.description,
        "purpose": model.purpose,
        "problem": model.problem or None,
    }


def _print(models: list[cache.ModelRef]) -> None:
    header = ["MODEL", "SIZE", "CONTEXT", "DESCRIPTION"]
    rows = [[model.id, size(model.size), str(model.context or "?"), _state(model)] for model in models]
    packed = [size(model.packed) if model.packed else "" for model in models]
    if any(packed):
        header.insert(2, "PACKED")
        for row, text in zip(rows, packed, strict=True):
            row.insert(2, text)
    table(header, rows)
    for model in models:
        if model.problem and not model.install:
            say(f"{model.id} cannot be used: {model.problem}")
        if model.unfinished:
            ways = f"localllm pull {model.id} continues it, localllm prune --all deletes them"
            say(f"{model.id}: an unfinished download and unused files take {size(model.unfinished)} more; {ways}")
    if notice := need_llamacpp(model.install for model in models):
        say(notice)
    if count := len([adapter for adapter in adapter_refs.available() if not adapter.bundled]):
        say(f"{'1 adapter' if count == 1 else f'{count} adapters'}: localllm adapters list shows them")
    if any(packed):
        say("PACKED: disk space of cached quantised weights; free it with localllm rm --packed MODEL")
    if all(model.bundled for model in models):
        say("for a larger model: localllm pull qwen3:0.6b; localllm search shows more models")


def _state(model: cache.ModelRef) -> str:
    """The description of a model; of a model with a problem, a mark before it."""
    if not model.problem:
        return ", ".join(filter(None, (model.description, "" if model.purpose == "chat" else f"{model.purpose} model")))
    without_config = "missing files" if model.revision else "unfinished download"
    return f"! {model.description or without_config}"


def remove(name: str, packed: bool, yes: bool, as_json: bool) -> int:
    """Delete a downloaded model, or only its cached quantised weights. Asks for confirmation."""
    config.load()
    from ..store import deletion

    plan = deletion.plan_packed_removal(name) if packed else deletion.plan_removal(name)
    return carry_out(plan, "localllm rm", yes=yes, as_json=as_json)
