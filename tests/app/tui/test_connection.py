"""What the UI asks of the daemon for the model it shows."""

from __future__ import annotations

import pytest

from localllm.app.config import Settings
from localllm.app.tui.connection import Connection

from .fake_client import FakeClient


@pytest.mark.parametrize("backend", [None, "cpu"])
async def test_a_forced_backend_is_for_the_models_loaded_here(backend: str | None) -> None:
    client = FakeClient()
    given: list[str | None] = []
    load = client.load

    async def noting_load(
        model: str, *, backend: str | None = None, quant: str | None = None, **rest: object
    ) -> object:
        given.append(backend)
        assert quant == "int4"
        return await load(model, backend=backend, **rest)  # type: ignore[arg-type]

    client.load = noting_load  # type: ignore[method-assign,assignment]
    settings = Settings()
    await Connection(settings, client.connect, backend, "int4").use("guide")  # type: ignore[arg-type]
    assert given == [backend]
    assert settings.backend == "auto", "the daemon's own settings are left alone"
