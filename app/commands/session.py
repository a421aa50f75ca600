"""A client with the model loaded, and OpenAI parameters from flags; for chat, run, bench and selftest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..client import Client, LoadedModel
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
    return [{"role": "system", "content": system}] if system else []


@asynccontextmanager
async def loaded_client(
    settings: Settings, model: str, backend: str | None, quant: str | None
) -> AsyncIterator[Client]:
    """A client of the daemon, with the model loaded. Starts the daemon if none runs.

    `backend` and `quant` apply to this model only. If an earlier call loaded the model with such options and this call
    sets none, the model keeps them, and a notice is printed.
    """
    async with await Client.connect(settings, on_status=say) as client:
        info = await client.load(model, backend=backend, quant=quant)
        options = _earlier_options(info, backend, quant)
        if options:
            say(
                f"{info.id} is already loaded, with {options} from an earlier call; "
                f"to load it with the settings, run localllm stop {info.id} first"
            )
        yield client


def _earlier_options(info: LoadedModel, backend: str | None, quant: str | None) -> str:
    """The load options of the model that an earlier call set and this call does not; empty if there are none."""
    overridden = []
    if backend not in (None, "auto"):
        overridden.append("--backend")
    if quant is not None:
        overridden.append("--quant")
    options = [option for option in info.options if option.split()[0] not in overridden]
    return " ".join(options)
