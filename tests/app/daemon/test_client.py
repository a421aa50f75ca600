"""The client against a real daemon with fake workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.app import paths
from localllm.app.client import Client, Done, LoadFlags, ReasoningPiece, TextPiece, ToolCall, Usage, transport
from localllm.app.client import client as clients
from localllm.app.config import Settings
from localllm.app.daemon import background
from localllm.app.developer import Developer
from localllm.app.errors import (
    ContextTooLong,
    DaemonUnreachable,
    InvalidRequest,
    ModelNotFound,
    ModelUnusable,
    PortTaken,
    UnsupportedParameter,
    WorkerDied,
)
from localllm.app.version import VERSION

from ...waiting import wait_until
from .conftest import Daemon, environment
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


async def test_warnings_of_a_prompt_are_told_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    monkeypatch.setattr(client, "_say", notices.append)
    await answer(client, "echo a b twice")
    assert notices == ["a token is there twice"]
    await answer(client, "echo a b")
    assert len(notices) == 1


async def test_chat_yields_events(client: Client) -> None:
    *pieces, done = await answer(client, "echo a b")
    assert pieces == [TextPiece("a "), TextPiece("b ")]
    assert isinstance(done, Done)
    assert done.finish == "stop"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.cached_tokens) == (3, 2, 1)
    assert 0 < done.ttft <= done.seconds


async def test_decode_rate_does_not_depend_on_the_reader(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_at_once(path: str, body: object) -> AsyncIterator[dict[str, Any]]:
        usage = {"prompt_tokens": 3, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 0}}
        yield {"choices": [{"delta": {"content": "a b"}, "finish_reason": "stop"}]}
        yield {"choices": [], "usage": usage | {"decode_seconds": 1e-9}}

    monkeypatch.setattr(client, "_events", all_at_once)
    done = (await answer(client, "echo a b"))[-1]
    assert done.seconds - done.ttft == pytest.approx(1e-9, rel=0.01)


async def test_usage_has_the_decode_time(client: Client) -> None:
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


async def test_complete_yields_events(client: Client) -> None:
    events = [event async for event in client.complete(MODEL, "echo a b", max_tokens=5)]
    assert events[:-1] == [TextPiece("a "), TextPiece("b ")]


async def test_closing_the_iterator_cancels_the_request(client: Client, daemon: Daemon) -> None:
    async with aclosing(client.chat(MODEL, say("slow 100000"))) as events:  # type: ignore[type-var]
        async for _ in events:
            break
        assert running(daemon) == 1
    wait_until(lambda: running(daemon) == 0)


async def test_errors_have_the_class_that_they_have_in_the_daemon(client: Client) -> None:
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


async def test_relative_folder_is_resolved(client: Client, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = daemon.folder / "hub" / "models--test--echo" / "snapshots" / "0123456789abcdef"
    monkeypatch.chdir(snapshot.parent)
    loaded = await client.load(f"./{snapshot.name}")
    assert loaded.id == str(snapshot)
    await client.unload(f"./{snapshot.name}")


async def test_client_starts_and_stops_the_daemon(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = short_folder()
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DaemonUnreachable, match="no daemon is running"):
        await Client.connect(Settings(), start=False)
    statuses: list[str] = []
    settings = Settings(port=0, developer=Developer(drain=0.1))
    async with await Client.connect(settings, on_status=statuses.append) as first:
        assert statuses == ["starting the daemon"]
        async with await Client.connect(settings, on_status=statuses.append) as second:
            assert statuses == ["starting the daemon"]  # the second connection starts nothing
            assert await second.loaded() == []
        await first.shutdown()
    assert not list((folder / "run").iterdir())


async def test_daemon_of_another_version_is_reported(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "VERSION", "99.0")
    with pytest.raises(DaemonUnreachable, match=rf"is localllm {VERSION}, this program is 99.0") as mismatch:
        await Client.connect(Settings())
    assert "localllm stop" in mismatch.value.hint
    statuses: list[str] = []
    async with await Client.connect(Settings(), start=False, on_status=statuses.append) as other:
        await other.loaded()  # stop and ps work with another version
    assert len(statuses) == 1


async def test_settings_that_differ_from_the_daemon_are_reported(
    client: Client, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", daemon.env["HF_HUB_CACHE"])

    async def said(**settings: Any) -> list[str]:
        statuses: list[str] = []
        async with await Client.connect(Settings(**settings), on_status=statuses.append):
            return statuses

    assert await said(port=1, idle_unload=5.0) == [], "other settings do not prevent a load"
    (words,) = await said(context=4096, developer=Developer(ops=("norm=reference",)))
    assert "context is 0, not 4096" in words
    assert "dev_ops is [], not ['norm=reference']" in words
    assert "localllm stop" in words


async def test_daemon_death_during_an_answer_is_an_error(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_port_of_another_program_is_reported(short_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(short_folder()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(background, "start", lambda _: (_ for _ in ()).throw(PortTaken("port 1 is taken")))
    with pytest.raises(PortTaken):
        await Client.connect(Settings())


def answering(monkeypatch: pytest.MonkeyPatch, parts: list[bytes], status: int = 200) -> tuple[Client, list[Any]]:
    """A client whose every response has these parts, and the list of its requests."""
    asked: list[Any] = []

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, request.headers.get("content-type"), request.content))
        return httpx.Response(status, content=body())

    monkeypatch.setattr(transport.paths, "socket_file", lambda: Path("/nowhere"))
    client = Client(Settings())
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost")
    return client, asked


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
    "decode_seconds": 2.0,
}
ANSWER = b"".join(
    [
        b": keep-alive\n\n",
        event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
        event(choices=[{"delta": {"reasoning": "h", "content": "é"}, "finish_reason": None}]),
        event(
            choices=[
                {"delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}, "finish_reason": None}
            ]
        ),
        event(
            choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, "finish_reason": None}]
        ),
        event(choices=[{"delta": {}, "finish_reason": "tool_calls"}]),
        event(choices=[], usage=USAGE),
        b"data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_split_at_any_byte_are_joined(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    client, asked = answering(monkeypatch, [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)])
    *pieces, done = [event async for event in client.chat("m", say("hi"), top_k=3)]
    assert pieces == [ReasoningPiece("h"), TextPiece("é"), ToolCall(id="c", name="f", arguments="{}")]
    assert (done.finish, done.usage) == (
        "tool_calls",
        Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2),
    )
    ((method, path, kind, body),) = asked
    assert (method, path, kind) == ("POST", "/v1/chat/completions", "application/json")
    assert json.loads(body) == {
        "model": "m",
        "messages": say("hi"),
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await client.close()


async def test_incomplete_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = event(choices=[{"delta": {"content": "x"}, "finish_reason": None}])
    client, _ = answering(monkeypatch, [piece])
    with pytest.raises(DaemonUnreachable, match="in the middle of the answer"):
        await answer(client, "hi")
    error = {"message": "gone", "type": "server_error", "param": None, "code": "worker_died"}
    client, _ = answering(monkeypatch, [piece, event(error=error)])
    with pytest.raises(WorkerDied, match="gone"):
        await answer(client, "hi")
    client, _ = answering(monkeypatch, [event(stage="reading", done=0.5)])
    with pytest.raises(DaemonUnreachable, match="while it loaded the model"):
        await client.load("m")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}"])
async def test_response_of_another_program_is_an_error(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    client, asked = answering(monkeypatch, [body], status=400)
    for asking in (client.models(), client.unload("m"), client.load("m")):
        with pytest.raises(DaemonUnreachable, match="does not understand"):
            await asking
    assert [method for method, *_ in asked] == ["GET", "POST", "POST"]
    assert json.loads(asked[1][3]) == {"model": "m"}


def test_decode_rate_excludes_the_first_token() -> None:
    usage = Usage(completion_tokens=5)
    assert Done(finish="stop", usage=usage, ttft=1.0, seconds=3.0).tokens_per_second == 2.0
    assert Done(finish="stop", usage=usage, ttft=3.0, seconds=3.0).tokens_per_second == 0.0


class Owners:
    """The results of `owner_pid`, one for each call; the last one repeats."""

    def __init__(self, *pids: int | None) -> None:
        self.pids = [*pids]

    def __call__(self) -> int | None:
        return self.pids.pop(0) if len(self.pids) > 1 else self.pids[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(clients, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(clients, "STOP_SECONDS", 1.0)


def status(version: str = VERSION, cache: str = "", **settings: Any) -> bytes:
    return json.dumps({"version": version, "pid": 1, "url": "u", "cache": cache, "settings": settings}).encode()


async def connecting(monkeypatch: pytest.MonkeyPatch, answers: list[bytes | None], *, start: bool, **local: Any) -> Any:
    """The status messages of a connection, and True if the client was closed. A response of None: no connection."""
    said: list[str] = []
    left = [*answers]

    def answer(_: httpx.Request) -> httpx.Response:
        body = left.pop(0) if len(left) > 1 else left[0]
        if body is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=body)

    made: list[Client] = []

    class Mocked(Client):
        def __init__(self, settings: Settings, on_status: Callable[[str], None]) -> None:
            super().__init__(settings, on_status)
            made.append(self)
            self._http = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost")

    monkeypatch.setattr(transport.paths, "socket_file", lambda: Path("/nowhere"))
    try:
        await Mocked.connect(Settings(**local), start=start, on_status=said.append)
    except DaemonUnreachable as error:
        return said, error.message, [one._http.is_closed for one in made]
    await made[0].close()
    return said, "", []


async def test_client_waits_for_a_daemon_that_starts(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setattr(clients, "owner_pid", Owners(0))
    assert await connecting(monkeypatch, [None, None, status()], start=False) == ([], "", [])
    said, error, closed = await connecting(monkeypatch, [None], start=False)
    assert (said, error, closed) == ([], "cannot reach the daemon: refused", [True])
    monkeypatch.setattr(clients, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(clients, "owner_pid", Owners(7, 7, None))
    _, error, closed = await connecting(monkeypatch, [None], start=False)
    assert (error, closed) == ("cannot reach the daemon: refused", [True]), "the daemon has ended: no wait"


@pytest.mark.parametrize("start", [False, True])
async def test_connect_without_a_daemon(monkeypatch: pytest.MonkeyPatch, quick: None, start: bool) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(background, "start", started.append)
    monkeypatch.setattr(clients, "owner_pid", Owners(None, 7))
    said, error, _ = await connecting(monkeypatch, [status()], start=start)
    if start:
        assert (said, error, len(started)) == (["starting the daemon"], "", 1)
    else:
        assert (said, error, started) == ([], "no daemon is running", [])


@pytest.mark.parametrize("start", [False, True])
async def test_connect_to_a_daemon_of_another_version(monkeypatch: pytest.MonkeyPatch, start: bool) -> None:
    monkeypatch.setattr(clients, "owner_pid", Owners(7))
    said, error, closed = await connecting(monkeypatch, [status("0.0.0")], start=start)
    words = f"the running daemon is localllm 0.0.0, this program is {VERSION}"
    assert (said, error, closed) == (([], words, [True]) if start else ([words], "", []))


@pytest.mark.parametrize(
    ("local", "daemon_settings", "words"),
    [
        ({}, {"quant": "int8"}, ""),
        ({"quant": "int8"}, {"quant": "int8"}, ""),
        ({"quant": "int8"}, {"quant": "none"}, "quant is none, not int8"),
        (
            {"quant": "int8", "threads": 3},
            {"quant": "none", "threads": 1},
            "quant is none, not int8, threads is 1, not 3",
        ),
        ({"developer": Developer(ops=("a",))}, {"ops": ["a"]}, ""),
        ({"port": 1}, {"quant": "int8"}, ""),
    ],
)
async def test_connect_reports_only_settings_that_are_set(
    monkeypatch: pytest.MonkeyPatch, local: dict[str, Any], daemon_settings: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(clients, "owner_pid", Owners(7))
    said, _, _ = await connecting(monkeypatch, [status(**daemon_settings)], start=True, **local)
    assert said == (
        [f"the running daemon has other settings ({words}); to apply yours, run localllm stop"] if words else []
    )
    said, _, _ = await connecting(monkeypatch, [status(**daemon_settings)], start=False, **local)
    assert said == [], "only a client that may start the daemon compares settings"


async def test_connect_reports_a_daemon_with_another_model_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "owner_pid", Owners(7))
    said, _, _ = await connecting(monkeypatch, [status(cache="/elsewhere/hub")], start=True)
    assert said == ["the running daemon has another model cache (/elsewhere/hub); to use yours, run localllm stop"]
    said, _, _ = await connecting(monkeypatch, [status(cache=paths.hub_cache_without_links())], start=True)
    assert said == []


async def test_shutdown_waits_for_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    client, asked = answering(monkeypatch, [b"{}"], status=202)
    client._settings = Settings(developer=Developer(drain=0.0))
    monkeypatch.setattr(clients, "owner_pid", Owners(7, 7, 0, None))
    assert not client.over
    await client.shutdown()
    assert client.over
    assert [(method, path) for method, path, *_ in asked] == [("POST", "/admin/shutdown")]
    monkeypatch.setattr(clients, "owner_pid", Owners(7))
    with pytest.raises(DaemonUnreachable, match="did not stop in time"):
        await client.shutdown()
    await client.close()


async def test_load_reports_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = {"id": "m", "state": "ready", "pid": 7}
    client, asked = answering(monkeypatch, [event(stage="reading", done=0.5), event(**loaded)])
    statuses: list[tuple[str, float]] = []
    model = await client.load(
        "./m",
        flags=LoadFlags(backend="cpu", quant="int8"),
        exact=True,
        on_progress=lambda *words: statuses.append(words),
    )
    assert (model.id, statuses) == ("m", [("reading", 0.5)])
    assert json.loads(asked[0][3]) == {
        "model": str(tmp_path / "m"),
        "backend": "cpu",
        "quant": "int8",
        "context": None,
        "rope_scaling": None,
        "rope_scale": None,
        "rope_base": None,
        "exact": True,
        "for_chat": False,
    }
    assert (await client.load("org/m")).id == "m"
    assert json.loads(asked[1][3])["model"] == "org/m"
    await client.close()


async def test_error_keeps_numbers_and_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"message": "m", "type": "t", "param": "p", "code": "context_length_exceeded", "hint": "h", "n_ctx": 4}
    for status in (400, 503):
        client, _ = answering(monkeypatch, [json.dumps({"error": body}).encode()], status=status)
        for asking in (client.models(), client.load("m"), answer(client, "hi")):
            with pytest.raises(ContextTooLong) as caught:
                await asking
            error = caught.value
            assert (error.message, error.hint, error.param, error.numbers) == ("m", "h", "p", {"n_ctx": 4})
    client, _ = answering(monkeypatch, [b"[]"], status=399)
    assert await client.models() == []


async def test_complete_sends_a_plain_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        event(choices=[{"text": "a", "finish_reason": None}]),
        event(choices=[{"text": "", "finish_reason": "length"}]),
        event(choices=[], usage=USAGE),
    ]
    client, asked = answering(monkeypatch, parts)
    piece, done = [event async for event in client.complete("m", "hi", max_tokens=3)]
    assert (piece, done.finish, done.usage.completion_tokens) == (TextPiece("a"), "length", 5)
    assert 0 <= done.ttft <= done.seconds
    body = json.loads(asked[0][3])
    assert (asked[0][1], body["prompt"], body["max_tokens"], body["stream"]) == ("/v1/completions", "hi", 3, True)


async def test_answers_have_the_options_of_the_load_of_their_client(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", daemon.env["LOCALLLM_RUNTIME_DIR"])
    notices: list[str] = []
    async with (
        await Client.connect(Settings(), start=False) as first,
        await Client.connect(Settings(), start=False, on_status=notices.append) as second,
    ):
        flags = LoadFlags(quant="int8")
        assert (await first.load("test/other", flags=flags, exact=True)).options == ("--quant int8",)
        assert (await second.load("test/other", exact=True)).options == ()
        assert (await first.load("test/other")).options == (), "this call only describes the model as it is loaded"
        for client, options in ((first, ("--quant int8",)), (second, ()), (second, ()), (first, ("--quant int8",))):
            assert [event async for event in client.chat("test/other", say("echo a"))]
            assert daemon.loaded()["test/other"]["options"] == list(options)
        busy = first.chat("test/other", say("slow 100"))
        await anext(busy)
        assert [event async for event in second.chat("test/other", say("echo a"))]
        assert notices == ["test/other is busy and stays loaded with --quant int8; this call has no effect on that"]
        with pytest.raises(InvalidRequest, match="busy with quant int8"):
            await second.load("test/other", flags=LoadFlags(quant="int4"), exact=True)
        await busy.aclose()
        await first.unload("test/other")
        assert [event async for event in first.chat("test/other", say("echo a"))]
        assert daemon.loaded()["test/other"]["options"] == ["--quant int8"], "also after it was unloaded"
