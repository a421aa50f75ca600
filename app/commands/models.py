"""`localllm list` and `rm`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import config
from ..sizes import size
from ..store.local import snapshots
from ..store.local.ggufs import need_llamacpp
from ..store.records import ListedModel
from .console import print_json, say, table
from .removal import carry_out

COLUMNS = ("MODEL", "SIZE", "PACKED", "CONTEXT", "DESCRIPTION")


def list_models(as_json: bool) -> int:
    """Print the models on this machine."""
    config.load()
    from ..store import listing

    models = listing.listed(wait=True)
    if as_json:
        print_json(models)
    else:
        _print(models)
    return 0


def _print(models: list[ListedModel]) -> None:
    is_packed = any(model.packed for model in models)
    rows = [_row(model) for model in models]
    columns = [name for name in COLUMNS if is_packed or name != "PACKED"]
    table(columns, [[row[name] for name in columns] for row in rows])
    for line in _notices(models):
        say(line)
    if is_packed:
        say("PACKED: disk space of cached quantised weights; free it with localllm rm --packed MODEL")
    if all(model.bundled for model in models):
        say("for a larger model: localllm pull qwen3:0.6b; localllm search shows more models")


def _row(model: ListedModel) -> dict[str, str]:
    packed = size(model.packed) if model.packed else ""
    return dict(
        zip(COLUMNS, (model.id, size(model.size), packed, str(model.context or "?"), _state(model)), strict=True)
    )


def _notices(models: list[ListedModel]) -> Iterator[str]:
    for model in models:
        if model.problem and not model.install:
            yield f"{model.id} cannot be used: {model.problem}"
        if model.unfinished:
            ways = f"localllm pull {model.id} continues it, localllm prune --all deletes them"
            yield f"{model.id}: an unfinished download and unused files take {size(model.unfinished)} more; {ways}"
    if notice := need_llamacpp(model.install for model in models):
        yield notice
    if count := len([adapter for adapter in snapshots.adapters() if not adapter.bundled]):
        yield f"{'1 adapter' if count == 1 else f'{count} adapters'}: localllm adapters list shows them"


def _state(model: ListedModel) -> str:
    """The description of a model, with a mark before it if the model has a problem."""
    if not model.problem:
        return ", ".join(filter(None, (model.description, "" if model.purpose == "chat" else f"{model.purpose} model")))
    without_config = "missing files" if model.revision else "unfinished download"
    return f"! {model.description or without_config}"


def remove(name: str, packed: bool, yes: bool, as_json: bool) -> int:
    """Delete a downloaded model, or only its cached quantised weights. Asks for confirmation."""
    config.load()
    from ..store.changes import deletion

    plan = deletion.plan_packed_removal(name) if packed else deletion.plan_removal(name)
    return carry_out(plan, "localllm rm", yes=yes, as_json=as_json)
