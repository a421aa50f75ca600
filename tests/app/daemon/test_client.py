"""Our own client against a real daemon, with fake workers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from localllm.app import client as clients
from localllm.app.client import Client, Done, ReasoningPiece, TextPiece, ToolCall
from localllm.app.config import Settings
from localllm.app.daemon import background
from localllm.app.errors import (
    ContextTooLong,
    DaemonUnreachable,
    ModelNotFound,
    ModelUnusable,
    UnsupportedParameter,
    WorkerDied,
)
from localllm.app.version import VERSION

from .conftest import Daemon, environment, wait_until
from .test_wire import running

MODEL = "test/echo"


@pytest.fixture
async def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", daemon.env["LOCALLLM_RUNTIME_DIR"])
    async with await Client.connect(Settings(), start=False) as connected:
        yield connected


def say(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


async def answer(client: Client, words: str, **parameters: Any) -> list[Any]:
    return [event async for event in client.chat(MODEL, say(words), **parameters)]


async def test_an_answer_as_events(client: Client) -> None:
    *pieces, done = await answer(client, "echo a b")
    assert pieces == [TextPiece("a "), TextPiece("b ")]
    assert isinstance(done, Done)
    assert done.finish == "stop"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (3, 2, 1)
    assert 0 < done.ttft <= done.seconds


async def test_the_rate_is_the_daemons_however_late_the_pieces_are_read(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_at_once(path: str, body: object) -> AsyncIterator[dict[str, Any]]:
        usage = {"prompt_tokens": 3, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}}
        yield {"choices": [{"delta": {"content": "a b"}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": usage | {"decode_seconds": 1e-9}}

    monkeypatch.setattr(client, "_events", all_at_once)
    done = (await answer(client, "echo a b"))[-1]
    assert done.seconds - done.ttft == pytest.approx(1e-9, rel=0.01)


async def test_usage_tells_how_long_the_pieces_took(client: Client) -> None:
    done = (await answer(client, "slow 5"))[-1]
    assert done.seconds - done.ttft >= 4 * 0.015, "20 ms apart"
    (one_piece_done,) = (await answer(client, "echo a"))[-1:]
    assert one_piece_done.seconds == one_piece_done.ttft
    assert one_piece_done.tokens_per_second == 0


async def test_reasoning_and_tool_calls(client: Client) -> None:
    assert (await answer(client, "think"))[:-1] == [ReasoningPiece("hm "), ReasoningPiece("so"), TextPiece("done")]
    *calls, done = await answer(client, "call")
    assert calls == [
        ToolCall(id="call_0", name="add", arguments='{"a": 1}'),
        ToolCall(id="call_1", name="subtract", arguments='{"a": 1}'),
    ]
    assert done.finish == "tool_calls"


async def test_text_passes_unchanged(client: Client) -> None:
    *pieces, _ = await answer(client, "breaks")
    assert "".join(piece.text for piece in pieces) == "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng"
    *pieces, _ = await answer(client, "flood 3000")
    assert "".join(piece.text for piece in pieces) == "".join(f"{number} " for number in range(3000))


async def test_complete(client: Client) -> None:
    events = [event async for event in client.complete(MODEL, "echo a b", max_tokens=5)]
    assert events[:-1] == [TextPiece("a "), TextPiece("b ")]


async def test_closing_the_iterator_cancels(client: Client, daemon: Daemon) -> None:
    async with aclosing(client.chat(MODEL, say("slow 100000"))) as events:  # type: ignore[type-var]
        async for _ in events:
            break
        assert running(daemon) == 1
    wait_until(lambda: running(daemon) == 0)


async def test_errors_come_back_as_themselves(client: Client) -> None:
    with pytest.raises(ContextTooLong) as overflow:
        await answer(client, "refuse")
    assert overflow.value.numbers == {"n_prompt_tokens": 99, "n_ctx": 64}
    assert overflow.value.param == "messages"
    with pytest.raises(UnsupportedParameter, match="temprature") as typo:
        await answer(client, "echo", temprature=1)
    assert typo.value.hint == "did you mean 'temperature'?"
    with pytest.raises(WorkerDied):
        await answer(client, "crash")
    with pytest.raises(ModelNotFound, match="eccho") as missing:
        await client.load("test/eccho")
    assert "test/echo" in missing.value.hint
    with pytest.raises(ModelUnusable, match="cut short"):
        await client.load("test/broken")
    with pytest.raises(ModelNotFound):
        await client.unload("test/broken")


async def test_models_load_and_unload(client: Client) -> None:
    steps: list[float] = []
    loaded = await client.load("test/slow", on_progress=lambda _, done: steps.append(done))
    assert (loaded.id, loaded.state, loaded.context) == ("test/slow", "ready", 64)
    assert steps == [0, 0.25, 0.5, 0.75]
    assert {model.id for model in await client.loaded()} >= {"test/slow"}
    entries = {model.id: model for model in await client.models()}
    assert entries["test/slow"].loaded
    assert not entries["test/other"].loaded
    await client.unload("test/slow")
    assert "test/slow" not in {model.id for model in await client.loaded()}


async def test_a_relative_folder_is_found(client: Client, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = daemon.folder / "hub" / "models--test--echo" / "snapshots" / "0123456789abcdef"
    monkeypatch.chdir(snapshot.parent)
    loaded = await client.load(f"./{snapshot.name}")
    assert loaded.id == str(snapshot)
    await client.unload(f"./{snapshot.name}")


async def test_start_on_demand_and_shutdown(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = short_folder()
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DaemonUnreachable, match="no daemon runs"):
        await Client.connect(Settings(), start=False)
    told: list[str] = []
    settings = Settings(port=0, drain=0.1)
    async with await Client.connect(settings, on_status=told.append) as first:
        assert told == ["starting the daemon"]
        async with await Client.connect(settings, on_status=told.append) as second:
            assert told == ["starting the daemon"]  # it runs by now
            assert await second.loaded() == []
        await first.shutdown()
    assert not list((folder / "run").iterdir())


async def test_another_version_is_said(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "VERSION", "99.0")
    with pytest.raises(DaemonUnreachable, match=rf"is localllm {VERSION}, but this is 99.0") as mismatch:
        await Client.connect(Settings())
    assert "localllm stop" in mismatch.value.hint
    told: list[str] = []
    async with await Client.connect(Settings(), start=False, on_status=told.append) as other:
        await other.loaded()  # stop and ps work all the same
    assert len(told) == 1


async def test_settings_that_the_running_daemon_does_not_have_are_said(client: Client) -> None:
    async def said(**settings: Any) -> list[str]:
        told: list[str] = []
        async with await Client.connect(Settings(**settings), on_status=told.append):
            return told

    assert await said(port=1, idle_unload=5.0) == [], "it loads models all the same"
    (words,) = await said(context=4096, reference_ops=("norm",))
    assert "context is 0, not 4096" in words
    assert "reference_ops is [], not ['norm']" in words
    assert "localllm stop" in words


async def test_a_daemon_that_dies_in_the_middle(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(short_folder())
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", daemon.env["LOCALLLM_RUNTIME_DIR"])
    try:
        async with await Client.connect(Settings(), start=False) as client:
            async with aclosing(client.chat(MODEL, say("slow 100000"))) as events:  # type: ignore[type-var]
                await anext(events)
                os.kill(daemon.pid, signal.SIGKILL)
                daemon.process.wait()
                with pytest.raises(DaemonUnreachable):
                    async for _ in events:
                        pass
            with pytest.raises(DaemonUnreachable):
                await client.models()
    finally:
        daemon.stop()


async def test_a_stranger_at_the_port_is_said(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(short_folder()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(background, "start", lambda _: (_ for _ in ()).throw(clients.PortTaken("port 1 is taken")))
    with pytest.raises(clients.PortTaken):
        await Client.connect(Settings())
