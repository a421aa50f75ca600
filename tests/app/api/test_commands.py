"""Work of the store in child processes."""

from __future__ import annotations

import sys

import msgspec
import pytest

from localllm.app.api import commands
from localllm.app.api.admin import FitBody, ModelBody
from localllm.app.errors import InvalidRequest, ModelNotFound, WorkerDied
from localllm.app.store.records import ModelFacts

GUIDE = ModelBody(model="guide")


async def test_result_is_a_struct() -> None:
    facts = msgspec.json.decode(await commands.run("show", GUIDE), type=ModelFacts)
    assert (facts.id, facts.kind) == ("guide", "model")


async def test_errors_of_the_work_are_errors_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nonsense", "--help"):
        with pytest.raises((ModelNotFound, InvalidRequest), match=name) as caught:
            await commands.run("inspect", ModelBody(model=name))
        assert caught.value.param == "model"
    with pytest.raises(InvalidRequest, match="abacus") as caught:
        await commands.run("fit", FitBody(model="guide", backend="abacus"))
    assert caught.value.param == "backend"
    for output in ("", "no reply", "\x81"):
        script = f"print({output!r}, end=''); raise SystemExit(1)"
        monkeypatch.setattr(commands, "COMMAND", (sys.executable, "-S", "-c", script))
        with pytest.raises(WorkerDied, match="localllm inspect crashed"):
            await commands.run("inspect", GUIDE)


async def test_child_without_an_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND", (sys.executable, "-S", "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(commands, "SECONDS", 0.2)
    with pytest.raises(WorkerDied, match="no result within"):
        await commands.run("inspect", GUIDE)


async def test_program_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND", ("no such program",))
    with pytest.raises(WorkerDied, match="cannot start"):
        await commands.run("inspect", GUIDE)
