"""Shared by chat, run, bench and selftest: flags to OpenAI parameters, and a client with the model loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..client import Client, LoadedModel
from ..config import Settings
from .console import say


def parameters(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling flags with a value, by their names in an OpenAI body. `system` is a message, not a parameter."""
    body = {name: value for name, value in flags.items() if name != "system" and value not in (None, ())}
    if "stop" in body:
        body["stop"] = list(body["stop"])
    return body


def system_messages(system: str | None) -> list[dict[str, Any]]:
    """The messages before the first user message."""
    return [{"role": "system", "content": system}] if system else []


@asynccontextmanager
async def loaded_client(
    settings: Settings, model: str, backend: str | None, quant: str | None
) -> AsyncIterator[Client]:
    """A client of the daemon, with the model loaded. Starts the daemon if none runs.

    `backend` and `quant` apply to this model only. If the model is already loaded and the call has no such options, the
    model keeps the options of the earlier call, and a notice is printed.
    """
    async with await Client.connect(settings, on_status=say) as client:
        info = await client.load(model, backend=backend, quant=quant)
        if options := _earlier_options(info, backend, quant):
            say(
                f"{info.id} is already loaded, with {options} from an earlier call; "
                f"to load it with the settings, run localllm stop {info.id} first"
            )
        yield client


def _earlier_options(info: LoadedModel, backend: str | None, quant: str | None) -> str:
    """The options of an earlier call that this call does not give; empty if there are none."""
    current = {"--backend": backend not in (None, "auto"), "--quant": quant is not None}
    return " ".join(option for option in info.options if not current[option.split()[0]])
