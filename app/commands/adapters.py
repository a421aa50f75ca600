"""`localllm adapters`: list, load, unload and delete LoRA adapters."""

from __future__ import annotations

import asyncio
from typing import Any

from .. import config
from ..client import AdapterEntry, AdapterFolder, Client
from ..errors import AdapterNotFound, DaemonUnreachable, InvalidRequest
from ..sizes import size
from ..store import resolved
from ..store.adapters import folders
from ..store.names import adapter_name, is_path
from .console import print_json, say, table
from .removal import carry_out


def list_adapters(as_json: bool) -> int:
    """Print the adapters that are loaded, the built-in adapters, and the adapters in the model cache."""
    settings = config.load()
    loaded = asyncio.run(_loaded(settings))
    files = folders()
    if as_json:
        print_json({"loaded": loaded, "files": files})
        return 0
    if loaded:
        rows = [(f"{entry.model}:{entry.name}", f"{entry.scale:g}", entry.path) for entry in loaded]
        table(("ADAPTER", "DEFAULT SCALE", "FOLDER"), rows)
        for entry in loaded:
            _warn(entry)
    else:
        say("no adapter is loaded; localllm adapters load FOLDER loads one")
    if files:
        table(("FILES", "SIZE", "BASE MODEL"), [(_label(folder), size(folder.size), folder.base) for folder in files])
    return 0


def _warn(entry: AdapterEntry) -> None:
    if entry.warning:
        say(f"warning: {entry.model}:{entry.name}: {entry.warning}")


def _label(folder: AdapterFolder) -> str:
    return f"{folder.id} (built in)" if folder.bundled else folder.id


async def _loaded(settings: config.Settings) -> list[AdapterEntry]:
    try:
        async with await Client.connect(settings, start=False) as client:
            return await client.adapters()
    except DaemonUnreachable:
        return []


def load(adapter: str, name: str | None, model: str | None, replace: bool, pinned: bool, as_json: bool) -> int:
    """Load an adapter for a model. The daemon and the model are started if necessary."""
    settings = config.load()
    source = resolved.adapter(adapter, allow_path=True)
    path = str(source.path) if is_path(adapter) else source.id
    name = name or adapter_name(source.id)
    options = {"load_inplace": replace, "reuse": not replace, "pinned": pinned}
    entry = asyncio.run(_load(settings, name, path, model, **options))
    if as_json:
        print_json(entry, indent=None)
    else:
        _warn(entry)
        name = f"{entry.model}:{entry.name}"
        say(f"{name} is loaded and ready; try: localllm chat {entry.model} --adapter {entry.name}")
    return 0


async def _load(settings: config.Settings, name: str, path: str, model: str | None, **options: Any) -> AdapterEntry:
    async with await Client.connect(settings, on_status=say) as client:
        model = model or await _only_model(client) or settings.model
        info = await client.load(model)
        await client.load_adapter(name, path, model=info.id, **options)
        return _find(await client.adapters(), info.id, name)


async def _only_model(client: Client) -> str:
    """The id of the loaded model; empty if no model is loaded. Raises InvalidRequest if several models are loaded."""
    models = [model.id for model in await client.loaded()]
    if len(models) > 1:
        raise InvalidRequest(f"several models are loaded: {', '.join(models)}", hint="select one with --model")
    return models[0] if models else ""


def _find(entries: list[AdapterEntry], model: str, name: str) -> AdapterEntry:
    for entry in entries:
        if (entry.model, entry.name) == (model, name):
            return entry
    raise AdapterNotFound(f"adapter {name!r} of {model} was unloaded meanwhile")


def unload(name: str, model: str | None, as_json: bool) -> int:
    """Unload an adapter. Answers that use it go on."""
    asyncio.run(_unload(config.load(), name, model))
    if as_json:
        print_json({"unloaded": name}, indent=None)
    else:
        say(f"unloaded {name}")
    return 0


async def _unload(settings: config.Settings, name: str, model: str | None) -> None:
    async with await Client.connect(settings, start=False) as client:
        await client.unload_adapter(name, model=model)


def remove(name: str, yes: bool, as_json: bool) -> int:
    """Delete the files of a downloaded adapter. Asks for confirmation."""
    config.load()
    from ..store.changes import deletion

    plan = deletion.plan_adapter_removal(name)
    return carry_out(plan, "localllm adapters rm", yes=yes, as_json=as_json)
