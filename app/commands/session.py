"""A client with the model loaded, and OpenAI parameters from flags; for chat, run, bench and selftest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..client import Client, LoadedModel, LoadFlags, kept_notice
from ..config import Settings
from .console import say

UNSET = (None, ())  # the value of a missing flag is None, or () for a flag that may be repeated


def parameters(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling flags that are set, by their names in an OpenAI body. `system` is a message, not a parameter."""
    body = {}
    for name, value in flags.items():
        if name == "system" or value in UNSET:
            continue
        body[name] = list(value) if isinstance(value, tuple) else value
    return body


def system_messages(system: str | None) -> list[dict[str, Any]]:
    """The system message as a list of messages; empty without a text."""
    return [{"role": "system", "content": typed(system)}] if system else []


def typed(text: str) -> str:
    """A text of the command line, without a byte order mark and the \\r of a line that a file of Windows ends with."""
    return text.removeprefix("\ufeff").removesuffix("\r")


@asynccontextmanager
async def loaded_client(
    settings: Settings, model: str, flags: LoadFlags, *, for_chat: bool = False
) -> AsyncIterator[Client]:
    """A client of the daemon, with the model loaded. Starts the daemon if none runs.

    `for_chat`: raise WrongKind for a model that does not chat.

    `flags` belong to this load. If an earlier call loaded the model with other flags or settings, the model is loaded
    again; while it answers other requests, it keeps them. A notice says which flags the model has.
    """
    async with await Client.connect(settings, on_status=say) as client:
        processes = {info.id: info.pid for info in await client.loaded()}
        info = await client.load(model, flags=flags, exact=True, for_chat=for_chat)
        previous_pid = processes.get(info.id)
        if notice := _notice(info, previous_pid):
            say(notice)
        if info.pid != previous_pid:
            for warning in info.warnings:
                say(warning)
        yield client


def _notice(info: LoadedModel, previous_pid: int | None) -> str:
    """A notice about the flags that a model was loaded with; empty if an earlier call loaded it with the same flags.

    `previous_pid`: the worker process before this call; None: the model was not loaded.
    """
    if info.kept:
        return kept_notice(info)
    options = " ".join(info.options) or "the settings of the daemon"
    if info.pid == previous_pid:
        return ""
    if previous_pid is not None:
        return f"loaded {info.id} again, with {options}: an earlier call used other options"
    return f"loaded {info.id} with {options}" if info.options else ""
