"""The requests of the UI to the daemon when it loads a model."""

from __future__ import annotations

import pytest

from localllm.app.client import LoadFlags
from localllm.app.config import Settings
from localllm.app.tui.connection import Connection

from .fake_client import FakeClient


@pytest.mark.parametrize("backend", [None, "cpu"])
async def test_connection_passes_its_flags_when_it_loads_a_model(backend: str | None) -> None:
    client = FakeClient()
    calls: list[tuple[LoadFlags, bool]] = []
    load = client.load

    async def noting_load(model: str, *, flags: LoadFlags, exact: bool, **rest: object) -> object:
        calls.append((flags, exact))
        return await load(model, flags=flags, **rest)  # type: ignore[arg-type]

    client.load = noting_load  # type: ignore[method-assign,assignment]
    settings = Settings()
    flags = LoadFlags(backend=backend, quant="int4")
    await Connection(settings, client.connect, flags).use("guide")  # type: ignore[arg-type]
    assert calls == [(flags, True)]
    assert settings.backend == "auto", "the settings of the daemon do not change"
