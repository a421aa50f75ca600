"""`localllm list`, `pull` and `rm`."""

from __future__ import annotations

import json
import sys

import click

from .. import config
from ..errors import InvalidRequest
from ..sizes import size
from ..store import catalog
from .console import say, table


def list_models(as_json: bool) -> int:
    """The models on this machine."""
    config.load()
    models = catalog.available()
    if as_json:
        entries = [
            {
                "id": model.id,
                "bundled": model.bundled,
                "size": model.size,
                "packed": model.packed,
                "context": model.context,
                "revision": model.revision,
                "path": str(model.path),
                "description": model.description,
            }
            for model in models
        ]
        click.echo(json.dumps(entries, indent=2))
        return 0
    kept = any(model.packed for model in models)
    table(
        ("MODEL", "SIZE", *(["KEPT"] if kept else []), "CONTEXT", "DESCRIPTION"),
        [
            (
                model.id,
                size(model.size),
                *([size(model.packed) if model.packed else ""] if kept else []),
                str(model.context or "?"),
                model.description,
            )
            for model in models
        ],
    )
    if kept:
        say("KEPT are weights made smaller with --quant; localllm rm --packed MODEL frees them")
    if all(model.bundled for model in models):
        say("localllm pull org/repo fetches a larger model, for example Qwen/Qwen3-0.6B")
    return 0


def pull(name: str) -> int:
    """Download, or complete, a model."""
    config.load()
    from ..store import download

    model = download.pull(name, say)
    say(f"{model.id} is ready ({size(model.size)}); try: localllm chat {model.id}")
    return 0


def remove(name: str, packed: bool, yes: bool) -> int:
    """Delete a downloaded model, or only what was kept of it in smaller weights, after asking."""
    config.load()
    from ..store import hub

    plan = hub.plan_unpacking(name) if packed else hub.plan_removal(name)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest("rm asks before it deletes, and there is no terminal to ask in", hint="add --yes")
        if not click.confirm(f"Delete {plan.name} and free {size(plan.frees)}?", err=True):
            say("nothing was deleted")
            return 1
    plan.execute()
    say(f"{plan.name} is deleted; {size(plan.frees)} are free again")
    return 0
