"""The requests of the UI to the daemon when it loads a model."""

from __future__ import annotations

import pytest

from localllm.app.config import Settings
from localllm.app.tui.connection import Connection

from .fake_client import FakeClient


@pytest.mark.parametrize("backend", [None, "cpu"])
async def test_connection_passes_its_backend_when_it_loads_a_model(backend: str | None) -> None:
    client = FakeClient()
    backends: list[str | None] = []
    load = client.load

    async def noting_load(
        model: str, *, backend: str | None = None, quant: str | None = None, **rest: object
    ) -> object:
        backends.append(backend)
        assert quant == "int4"
        return await load(model, backend=backend, **rest)  # type: ignore[arg-type]

    client.load = noting_load  # type: ignore[method-assign,assignment]
    settings = Settings()
    await Connection(settings, client.connect, backend, "int4").use("guide")  # type: ignore[arg-type]
    assert backends == [backend]
    assert settings.backend == "auto", "the settings of the daemon do not change"
