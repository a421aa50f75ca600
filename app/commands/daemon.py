"""`localllm serve`, `ps` and `stop`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from .. import config
from ..client import Client, LoadedModel
from ..errors import DaemonUnreachable
from ..sizes import size
from .console import print_json, say, table
from .settings import without_unset


def serve(overrides: dict[str, Any]) -> int:
    """Run the daemon until a signal stops it."""
    settings = config.load(without_unset(overrides))
    from ..daemon import lifecycle

    return lifecycle.serve(settings)


def ps(as_json: bool) -> int:
    """Print the loaded models."""
    models = asyncio.run(_loaded(config.load()))
    if as_json:
        print_json([msgspec.to_builtins(model) for model in models or []])
    elif models is None:
        say("no daemon is running; localllm serve or localllm chat starts one")
    elif not models:
        say("the daemon is running; no model is loaded")
    else:
        table(("MODEL", "STATE", "BACKEND", "CONTEXT", "MEMORY", "BUSY", "UNLOADS IN"), [_row(m) for m in models])
    return 0


async def _loaded(settings: config.Settings) -> list[LoadedModel] | None:
    try:
        async with await Client.connect(settings, start=False) as client:
            return await client.loaded()
    except DaemonUnreachable:
        return None


def _row(model: LoadedModel) -> tuple[str, ...]:
    backend = " ".join(filter(None, (model.backend, model.dtype, model.quant)))
    context = str(model.context or "")
    memory = size(model.memory) if model.memory else ""
    return (model.id, model.state, backend, context, memory, str(model.requests), _unload_in(model))


def _unload_in(model: LoadedModel) -> str:
    if model.requests:
        return ""  # the idle time starts when the last request ends
    return "never" if model.unload_in is None else f"{model.unload_in:.0f} s"


def stop(model: str | None) -> int:
    """Unload `model`, or stop the daemon."""
    return asyncio.run(_stop(config.load(), model))


async def _stop(settings: config.Settings, model: str | None) -> int:
    try:
        client = await Client.connect(settings, start=False)
    except DaemonUnreachable:
        say("no daemon is running")
        return 0
    async with client:
        if model:
            await client.unload(model)
            say(f"unloaded {model}")
        else:
            await client.shutdown()
            say("stopped the daemon")
    return 0
