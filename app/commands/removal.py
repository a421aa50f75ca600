"""Confirms and carries out a planned deletion: the common part of `localllm rm` and `localllm adapters rm`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from .. import config
from ..client import AdapterEntry, Client
from ..daemon.names import is_inside
from ..errors import DaemonUnreachable, InvalidRequest
from ..sizes import size
from ..store.local.finding import find
from .console import print_json, say

if TYPE_CHECKING:
    from ..store.changes.deletion import Removal


@dataclass(frozen=True, slots=True)
class _InUse:
    """The models and the adapters that the daemon has loaded from the files of a plan."""

    models: list[str]
    adapters: list[AdapterEntry]

    @property
    def names(self) -> list[str]:
        return [*self.models, *(f"{adapter.model}:{adapter.name}" for adapter in self.adapters)]


def carry_out(plan: Removal, command: str, *, yes: bool, as_json: bool) -> int:
    """Delete the files of a plan, after a confirmation unless `yes`. The result is the exit code.

    Models and adapters of these files that are loaded are unloaded first. `command` is the name of the command in the
    error message. Raises InvalidRequest if no terminal can confirm.
    """
    settings = config.load()
    in_use = asyncio.run(_in_use(settings, plan))
    for name in in_use.names:
        say(f"{name} is loaded; the deletion unloads it")
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                f"{command} needs a terminal to ask for confirmation", hint="add --yes to delete without confirmation"
            )
        if not click.confirm(f"Delete {_title(plan)} and free {size(plan.frees)}?", err=True):
            say("deleted nothing")
            return 1
    if in_use.names:
        asyncio.run(_unload(settings, in_use))
    plan.execute()
    if as_json:
        print_json(msgspec.structs.replace(plan.result, unloaded=in_use.names), indent=None)
    else:
        say(f"deleted {_title(plan)}; freed {size(plan.frees)}")
    return 0


async def _in_use(settings: config.Settings, plan: Removal) -> _InUse:
    try:
        async with await Client.connect(settings, start=False) as client:
            models = [model.id for model in await client.loaded()]
            adapters = await client.adapters()
    except DaemonUnreachable:
        return _InUse([], [])
    return _InUse(
        [model for model in models if (path := _path_of(model)) and is_inside(path, plan.folders)],
        [adapter for adapter in adapters if is_inside(Path(adapter.path), plan.folders)],
    )


def _path_of(model: str) -> Path | None:
    """The files of a loaded model; None if they have been deleted."""
    ref = find(model, allow_path=True)
    return None if ref is None else ref.path


async def _unload(settings: config.Settings, in_use: _InUse) -> None:
    async with await Client.connect(settings, start=False) as client:
        for adapter in in_use.adapters:
            await client.unload_adapter(adapter.name, model=adapter.model)
        for model in in_use.models:
            await client.unload(model)


def _title(plan: Removal) -> str:
    """The name of the files and the aliases that the plan removes."""
    if not plan.aliases:
        return plan.name
    noun = "alias" if len(plan.aliases) == 1 else "aliases"
    return f"{plan.name} with its {noun} {', '.join(plan.aliases)}"
