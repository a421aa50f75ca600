"""Faults of a hub: each answers one request wrongly. The table FAULTS has them by name."""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from .hub import Fault, Hub, Request, Stage


@dataclass
class Sometimes:
    """Applies a fault to the requests of one stage, at most `times` times."""

    fault: Callable[[Request], None]
    stage: Stage
    times: int
    count: int = 0

    def __call__(self, request: Request) -> bool:
        if request.stage != self.stage or self.count >= self.times:
            return False
        self.count += 1
        with contextlib.suppress(OSError):
            self.fault(request)
        return True


def status(code: int, **headers: str) -> Callable[[Request], None]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request: request.handler.reply(code, b'{"error": "fault"}', fields)


def raw(data: bytes) -> Callable[[Request], None]:
    """Send these bytes instead of a reply, and close the connection."""

    def send(request: Request) -> None:
        request.handler.wfile.write(data)
        close(request)

    return send


def close(request: Request) -> None:
    request.handler.wfile.flush()
    request.handler.close_connection = True


def reset(request: Request) -> None:
    request.handler.wfile.flush()
    linger = struct.pack("ii", 1, 0)
    request.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.handler.connection.close()
    request.handler.close_connection = True


def truncated(request: Request) -> None:
    request.handler.send_start(request, (request.end - request.start) // 2)
    close(request)


def reset_in_body(request: Request) -> None:
    request.handler.send_start(request, (request.end - request.start) // 2)
    reset(request)


def stall_before_headers(request: Request) -> None:
    request.handler.hub.closing.wait(1.0)
    close(request)


def stall_in_body(request: Request) -> None:
    request.handler.send_start(request, (request.end - request.start) // 2)
    request.handler.hub.closing.wait(1.0)
    close(request)


def drip(request: Request) -> None:
    """A few bytes in each interval, for longer than the client waits."""
    request.handler.send_start(request, 1)
    for _ in range(20):
        request.handler.wfile.write(b"x")
        request.handler.wfile.flush()
        if request.handler.hub.closing.wait(0.05):
            break
    close(request)


def drip_headers(request: Request) -> None:
    request.handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(30):
        request.handler.wfile.write(b"X-%d: 1\r\n" % number)
        request.handler.wfile.flush()
        if request.handler.hub.closing.wait(0.05):
            break
    close(request)


def _reply(request: Request, code: int, body: bytes, **headers: str) -> None:
    fields = {"ETag": request.etag}
    for name, value in headers.items():
        fields[name.replace("_", "-")] = value
    request.handler.reply(code, body, fields)


def _range(request: Request) -> str:
    return f"bytes {request.start}-{request.end - 1}/{len(request.body)}"


def _part(request: Request) -> bytes:
    return request.body[request.start : request.end]


def complete_file(request: Request) -> None:
    """Status 200 and the complete file, whatever range was requested."""
    _reply(request, 200, request.body)


def wrong_range(request: Request) -> None:
    position = f"bytes {request.start + 1}-{request.end}/{len(request.body) + 1}"
    _reply(request, 206, _part(request), Content_Range=position)


def shifted_range(request: Request) -> None:
    position = f"bytes {request.start + 1}-{request.end - 1}/{len(request.body)}"
    _reply(request, 206, _part(request)[1:], Content_Range=position)


def without_position(request: Request) -> None:
    _reply(request, 206, _part(request))


def malformed_position(request: Request) -> None:
    _reply(request, 206, _part(request), Content_Range="bytes -1-/x")


def other_total(request: Request) -> None:
    position = f"bytes {request.start}-{request.end - 1}/{len(request.body) + 7}"
    _reply(request, 206, _part(request), Content_Range=position)


def multipart(request: Request) -> None:
    _reply(request, 206, _part(request), Content_Type="multipart/byteranges; boundary=x")


def other_etag(request: Request) -> None:
    """Another version of the file: other bytes, another ETag."""
    data = bytes(len(_part(request)))
    request.handler.reply(206, data, {"ETag": '"flipped"', "Content-Range": _range(request)})


def gzipped(request: Request) -> None:
    _reply(request, 206, gzip.compress(_part(request)), Content_Range=_range(request), Content_Encoding="gzip")


def unknown_encoding(request: Request) -> None:
    _reply(request, 206, _part(request), Content_Range=_range(request), Content_Encoding="zstd, x-odd")


def bit_flip(request: Request) -> None:
    data = bytearray(_part(request))
    data[len(data) // 2] ^= 4
    _send_part(request, bytes(data))


def zeroed(request: Request) -> None:
    data = bytearray(_part(request))
    data[: len(data) // 2] = bytes(len(data) // 2)
    _send_part(request, bytes(data))


def _send_part(request: Request, data: bytes) -> None:
    if request.stage == "metadata" or "Range" not in request.handler.headers:
        _reply(request, 200, data)
    else:
        _reply(request, 206, data, Content_Range=_range(request))


def short_length(request: Request) -> None:
    """A Content-Length below the requested length."""
    _send_part(request, _part(request)[:-10])


def long_length(request: Request) -> None:
    """A body and a Content-Length above the requested length."""
    _send_part(request, _part(request) + b"more bytes")


def login_page(request: Request) -> None:
    _reply(request, 200, b"<html>please log in</html>", Content_Type="text/html")


def broken_chunks(request: Request) -> None:
    raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nnot a chunk")(request)


def ended_chunks(request: Request) -> None:
    body = b"%x\r\n%b\r\n" % (len(_part(request)), _part(request))
    raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)(request)


def endless_header(request: Request) -> None:
    raw(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 200_000)(request)


def two_lengths(request: Request) -> None:
    raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello")(request)


def redirect_loop(request: Request) -> None:
    request.handler.reply(302, b"", {"Location": request.path})


def redirect(location: str) -> Callable[[Request], None]:
    return lambda request: request.handler.reply(302, b"", {"Location": location})


def redirect_without_tls(request: Request) -> None:
    """To this server with https, which it does not speak."""
    port = request.handler.hub.url.rpartition(":")[2]
    request.handler.reply(307, b"", {"Location": f"https://127.0.0.1:{port}/x"})


def malformed_json(request: Request) -> None:
    request.handler.reply(200, b'{"sha": ')


def other_json(request: Request) -> None:
    request.handler.reply(200, b'{"id": "org/a", "sha": 5, "siblings": [{"rfilename": 7, "size": -1}], "Code": "200"}')


def _slow_start(request: Request) -> None:
    time.sleep(0.1)
    close(request)


FAULTS: dict[str, Callable[[Request], None]] = {
    **{f"status {code}": status(code) for code in (204, 400, 401, 403, 404, 408, 410, 416, 418, 429, 500, 502, 503)},
    "retry-after 0": status(503, Retry_After="0"),
    "retry-after date": status(429, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    "retry-after malformed": status(429, Retry_After="soon"),
    "retry-after too long": status(503, Retry_After="999999"),
    "closed": close,
    "closed late": _slow_start,
    "reset": reset,
    "reset in body": reset_in_body,
    "truncated": truncated,
    "stall before headers": stall_before_headers,
    "stall in body": stall_in_body,
    "drip": drip,
    "drip headers": drip_headers,
    "200 to a range": complete_file,
    "wrong range": wrong_range,
    "shifted range": shifted_range,
    "range without position": without_position,
    "range with malformed position": malformed_position,
    "other total": other_total,
    "multipart": multipart,
    "other etag": other_etag,
    "gzip": gzipped,
    "unknown encoding": unknown_encoding,
    "bit flip": bit_flip,
    "zeroed": zeroed,
    "short length": short_length,
    "long length": long_length,
    "login page": login_page,
    "garbage": raw(b"\x00\xff garbage \r\n\r\n"),
    "broken chunks": broken_chunks,
    "ended chunks": ended_chunks,
    "endless header": endless_header,
    "two lengths": two_lengths,
    "redirect loop": redirect_loop,
    "redirect to a file": redirect("file:///etc/passwd"),
    "redirect to nothing": redirect("http://"),
    "redirect to a closed port": redirect("http://127.0.0.1:9/x"),
    "redirect without TLS": redirect_without_tls,
    "malformed json": malformed_json,
    "other json": other_json,
}
STAGES: tuple[Stage, ...] = ("metadata", "start", "middle")


def inject(hub: Hub, name: str, stage: Stage, times: int) -> Sometimes:
    """Make the hub fail; the fault counts its uses."""
    fault = Sometimes(FAULTS[name], stage, times)
    typed: Fault = fault
    hub.fault = typed
    return fault
