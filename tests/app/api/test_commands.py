"""Commands of the store in child processes."""

from __future__ import annotations

import sys

import pytest

from localllm.app.api import commands
from localllm.app.errors import InvalidRequest, ModelNotFound, WorkerDied


async def test_errors_of_the_command_are_errors_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match="nonsense"):
        await commands.run("inspect", "nonsense")
    with pytest.raises(InvalidRequest, match="not the name of a model"):
        await commands.run("inspect", "--help")
    for output in ("no json", '{"half": '):
        script = f"print({output!r}); raise SystemExit(1)"
        monkeypatch.setattr(commands, "COMMAND", (sys.executable, "-S", "-c", script))
        with pytest.raises(WorkerDied, match="localllm inspect crashed"):
            await commands.run("inspect", "guide")


async def test_command_without_an_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND", (sys.executable, "-S", "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(commands, "SECONDS", 0.2)
    with pytest.raises(WorkerDied, match="no result within"):
        await commands.run("inspect", "guide")


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "x" * 10_000])
async def test_text_that_cannot_be_an_argument_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND", ("no such program",))
    with pytest.raises(InvalidRequest):
        await commands.run("inspect", text)


async def test_program_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMAND", ("no such program",))
    with pytest.raises(WorkerDied, match="cannot start"):
        await commands.run("inspect", "guide")
