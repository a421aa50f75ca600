"""HTTP connections with limits for the request line and headers. The unix socket accepts only its owner's processes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..api.replies import error_body
from ..errors import InvalidRequest

MAX_HEAD = 2**15  # bytes of request line and headers
HEAD_SECONDS = 30.0  # maximum time in which request line and headers must arrive


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end of a unix socket."""
    if sys.platform == "linux":
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    # macOS and the BSDs: struct xucred { unsigned version; uid_t uid; … } at level SOL_LOCAL
    credentials = connection.getsockopt(0, 1, 76)
    return int(struct.unpack_from("II", credentials)[1])


class Http(h11.Connection):
    """h11's connection, which writes the chunks of a body itself: a chunk changes no state, and the checks of h11 would
    cost more than the token that a chunk has."""

    _is_chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # of overloads
        if self._is_chunked and type(event) is h11.Data:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        output = super().send(event)
        self._is_chunked = (
            isinstance(event, h11.Response) and b"\r\ntransfer-encoding: chunked\r\n" in (output or b"").lower()
        )
        return output


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with the limits above. Malformed HTTP gets an error in OpenAI's format."""

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = Http(h11.SERVER, MAX_HEAD)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if raw.family == socket.AF_UNIX and peer_uid(raw) != os.getuid():
            transport.abort()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._expect_head()
        else:
            self._cancel_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._expect_head()  # a part of the next request has arrived

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        body = error_body(InvalidRequest(msg))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state is h11.IDLE:  # in other states, a response has started and no error can follow
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
