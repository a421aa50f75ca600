"""What chat, run and bench share: flags into an OpenAI body, and a connection with the model loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..client import Client, LoadedModel
from ..config import Settings
from .console import say


def parameters(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling flags that were given, by their names in an OpenAI body; `system` is a message, not one of them."""
    given = {name: value for name, value in asked.items() if name != "system" and value not in (None, ())}
    if "stop" in given:
        given["stop"] = list(given["stop"])
    return given


def opening(system: str | None) -> list[dict[str, Any]]:
    """The messages before the first turn."""
    return [{"role": "system", "content": system}] if system else []


@asynccontextmanager
async def loaded(settings: Settings, model: str, backend: str | None, quant: str | None) -> AsyncIterator[Client]:
    """A client of the daemon, started where none runs, with the model ready to answer.

    `backend` and `quant` are for this model only; the daemon keeps to the settings for others. A model that is loaded
    already is not loaded again for a call without them; the options of the earlier call are printed.
    """
    async with await Client.connect(settings, on_status=say) as client:
        ready = await client.load(model, backend=backend, quant=quant)
        if others := _options_of_others(ready, backend, quant):
            say(
                f"{ready.id} is loaded with {others}, as an earlier call asked; "
                f"after localllm stop {ready.id} it is loaded by the settings"
            )
        yield client


def _options_of_others(ready: LoadedModel, backend: str | None, quant: str | None) -> str:
    """The options that an earlier call loaded the model with and this one does not ask for; empty without any."""
    asked = {"--backend": backend not in (None, "auto"), "--quant": quant is not None}
    return " ".join(option for option in ready.options if not asked[option.split()[0]])
