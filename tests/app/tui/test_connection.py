"""The requests of the UI to the daemon when it loads a model."""

from __future__ import annotations

import pytest

from localllm.app.client import LoadedModel, LoadFlags
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


@pytest.mark.parametrize(
    ("options", "state"),
    [(("--quant int8",), "ready, still with --quant int8"), ((), "ready, still with its settings")],
)
async def test_state_says_that_a_busy_model_keeps_other_options(options: tuple[str, ...], state: str) -> None:
    client = FakeClient()

    async def kept(model: str, **_: object) -> LoadedModel:
        return LoadedModel(id=model, state="ready", pid=1, options=options, kept=True)

    client.load = kept  # type: ignore[method-assign,assignment]
    connection = Connection(Settings(), client.connect)  # type: ignore[arg-type]
    await connection.use("guide")
    assert connection.state == state


async def test_warnings_of_a_new_load_are_passed_on_once() -> None:
    client = FakeClient()
    info = LoadedModel(id="guide", state="ready", pid=1, warnings=("odd", "slow"))

    async def loaded(model: str, **_: object) -> LoadedModel:
        client.in_memory = [info]
        return info

    client.load = loaded  # type: ignore[method-assign,assignment]
    connection = Connection(Settings(), client.connect)  # type: ignore[arg-type]
    warnings: list[str] = []
    connection.on_warning = warnings.append
    await connection.use("guide")
    assert warnings == ["odd", "slow"]
    await connection.use("guide")
    assert warnings == ["odd", "slow"]
