"""One connection without a server: the time limit of a head, and the response to malformed HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from types import SimpleNamespace
from typing import Any

import h11
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from localllm.app.daemon import connection as connections
from localllm.app.daemon.connection import HEAD_SECONDS, Connection, Http

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"


class Transport:
    """Collects the bytes that are written."""

    def __init__(self, family: int = socket.AF_INET) -> None:
        self.family = family
        self.written = b""
        self.closed = False
        self.aborted = False

    def get_extra_info(self, name: str) -> Any:
        if name != "socket":
            return None
        return SimpleNamespace(
            family=self.family, getpeername=lambda: ("1.1.1.1", 1), getsockname=lambda: ("1.1.1.1", 2)
        )

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Timers:
    """The loop's `call_later`: timers that never fire."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: list[Any] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self.later, raising=False)

    def later(self, seconds: float, call: Any, *more: Any) -> Any:
        timer = SimpleNamespace(seconds=seconds, call=call)
        timer.cancel = lambda: self.running.remove(timer) if timer in self.running else None
        self.running.append(timer)
        return timer

    @property
    def of_heads(self) -> int:
        return sum(timer.seconds == HEAD_SECONDS for timer in self.running)


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    return Timers(monkeypatch)


def connected(transport: Transport) -> Connection:
    config = Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    made = Connection(config, ServerState(), {})
    made.connection_made(transport)  # type: ignore[arg-type]
    return made


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_timer_runs_until_the_head_is_complete(timers: Timers) -> None:
    """The timer does not run during the body, the response, and the pause before the next request."""
    transport = Transport()
    one = connected(transport)
    assert timers.of_heads == 1
    one.data_received(HEAD[:10])
    assert timers.of_heads == 1, "one timer for all parts of a head"
    one.data_received(HEAD[10:])
    assert timers.of_heads == 0
    one.data_received(b"ab")
    await settled()
    assert transport.written.startswith(b"HTTP/1.1 200")
    assert timers.of_heads == 0
    one.data_received(HEAD[:10])
    assert timers.of_heads == 1, "the next head began"
    (timer,) = [timer for timer in timers.running if timer.seconds == HEAD_SECONDS]
    timer.call()
    assert transport.closed
    one.connection_lost(None)
    assert timers.of_heads == 0


async def test_timer_starts_for_a_head_that_follows_a_body(timers: Timers) -> None:
    one = connected(Transport())
    one.data_received(HEAD + b"ab" + HEAD[:10])
    await settled()
    assert timers.of_heads == 1
    one.connection_lost(None)


@pytest.mark.parametrize(("other", "dropped"), [(0, False), (1, True)])
async def test_socket_refuses_other_users(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, other: int, dropped: bool
) -> None:
    monkeypatch.setattr(connections, "peer_uid", lambda _: os.getuid() + other)
    for family, aborted in ((socket.AF_UNIX, dropped), (socket.AF_INET, False)):
        transport = Transport(family)
        one = connected(transport)
        assert (transport.aborted, timers.of_heads) == (aborted, 0 if aborted else 1)
        one.connection_lost(None)
    assert timers.of_heads == 0


async def test_malformed_http_gets_an_openai_error(timers: Timers) -> None:
    transport = Transport()
    connected(transport).data_received(b"nonsense\r\n\r\n")
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert {b"content-type: application/json", b"connection: close"} <= set(head.lower().split(b"\r\n"))
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert transport.closed


async def test_no_error_follows_a_response_that_has_begun(timers: Timers) -> None:
    transport = Transport()
    one = connected(transport)
    one.data_received(HEAD + b"ab")
    one.conn.send(connections.h11.Response(status_code=200, headers=[(b"content-length", b"1")]))
    one.send_400_response("late")
    assert (transport.written, transport.closed) == (b"", True)
    one.connection_lost(None)
    await settled()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"5")]])
def test_bodies_have_the_bytes_of_h11(version: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    def sent(connection: h11.Connection) -> list[bytes | None]:
        connection.receive_data(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
        assert isinstance(connection.next_event(), h11.Request)
        assert isinstance(connection.next_event(), h11.EndOfMessage)
        response = h11.Response(status_code=200, headers=headers)
        bodies = [h11.Data(data=data) for data in (b"ab", b"", b"cde")]
        return [connection.send(event) or b"" for event in (response, *bodies, h11.EndOfMessage())]

    assert sent(Http(h11.SERVER)) == sent(h11.Connection(h11.SERVER))
