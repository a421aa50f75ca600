"""The layers around the routes, each with one worry. Outermost first:

    Traced     a request id, a line in the log
    Errors     every error becomes OpenAI's error body
    Heads      request line and headers are of bounded size
    Paths      /v1//models/ is /v1/models
    Hosts      the Host header names this machine            (against DNS rebinding)
    Origins    a web page is let in only where it is listed  (against cross-site requests)
    Keys       the API key, where one is set

The unix socket is not for browsers or other users: its file mode and the peer's user id guard it, and the last
three let it pass.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import AppError, Forbidden, InvalidRequest, OutOfMemory, Overloaded, Stopping, Unauthorized, WorkerDied
from .body import ClientGone
from .connection import MAX_HEAD
from .replies import error_body

log = logging.getLogger(__name__)

PUBLIC = {"/health"}  # routes that need no key
RETRY_AFTER_SECONDS = "1"
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
CORS_HEADERS = (
    "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Stainless-Arch, X-Stainless-Async, X-Stainless-Lang, "
    "X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Read-Timeout, X-Stainless-Retry-Count, "
    "X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, X-Stainless-Helper-Method"
)


def is_local(scope: Scope) -> bool:
    """The request came over the unix socket."""
    return scope["server"] is not None and scope["server"][1] is None


def error_response(error: AppError, headers: dict[str, str] | None = None) -> Response:
    """An error as a whole response, with what tells clients whether to try again."""
    sent = dict(headers or {})
    if isinstance(error, Overloaded | OutOfMemory | Stopping):
        sent["retry-after"] = RETRY_AFTER_SECONDS
    elif error.status >= 500 and not isinstance(error, WorkerDied):
        sent["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        sent["www-authenticate"] = "Bearer"
    if error.status == 413:
        sent["connection"] = "close"  # the rest of the body is not read
    return Response(error_body(error), error.status, sent, "application/json")


class Traced:
    """Gives every request an id (the client's, where it sent a sane one) and every response its header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = REQUEST_ID.fullmatch(_header(scope, b"x-request-id") or b"")
        request_id = given[0].decode() if given else f"req-{uuid.uuid4().hex}"
        started = time.perf_counter()
        status = 499  # nothing was sent: the client had gone

        async def traced_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, traced_send)
        finally:
            took = (time.perf_counter() - started) * 1000
            log.info("%s %s %.200r %d %.1f ms", request_id, scope["method"], scope["path"], status, took)


class Errors:
    """Turns what is raised inside into a response; our own bugs are logged and answered without detail."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
            return
        except ClientGone:
            return
        except AppError as raised:
            error = raised
        except Exception:
            log.exception("internal error in %s", scope["path"])
            error = AppError("internal error in the daemon; see its log")
        if not started:
            await error_response(error)(scope, receive, send)


class Heads:
    """Refuses a head over the limit that arrived at once; the connection bounds what it waits for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > MAX_HEAD:
            raise InvalidRequest(f"the request line and the headers exceed the limit of {MAX_HEAD} bytes")
        await self.app(scope, receive, send)


class Paths:
    """Repeated slashes count as one, a trailing one as none."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/{2,}", "/", scope["path"])
        await self.app({**scope, "path": path.rstrip("/") or "/"}, receive, send)


class Hosts:
    """Refuses a Host header that does not name this machine: loopback, the address the request came in by, or
    one that was allowed. A name that a hostile page made resolve to this machine is none of them."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = {"localhost"} | {name.lower().strip("[]") for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_local(scope) and not self._knows(_header(scope, b"host") or b"", scope["server"][0]):
            raise Forbidden(
                "the Host header is not a name of this machine",
                hint="to accept more names, use the setting allowed_hosts",
            )
        await self.app(scope, receive, send)

    def _knows(self, header: bytes, own_address: str) -> bool:
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@]+))(?::\d{1,5})?", header.decode("latin-1"))
        if match is None:
            return False
        name = (match[1] or match[2]).lower()
        if name in self.allowed:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        own = ipaddress.ip_address(own_address.split("%")[0])
        if isinstance(own, ipaddress.IPv6Address) and own.ipv4_mapped:
            own = own.ipv4_mapped
        return address.is_loopback or address == own


class Origins:
    """Requests of web pages (those that carry Origin) are refused unless their origin is listed."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = {origin.rstrip("/").lower().encode() for origin in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = _headers(scope, b"origin")
        if is_local(scope) or not origins:
            await self.app(scope, receive, send)
            return
        if len(origins) > 1 or origins[0].lower() not in self.allowed:
            raise Forbidden(
                "this web origin may not call the daemon", hint="to allow it, use the setting allowed_origins"
            )
        cors = {"access-control-allow-origin": origins[0].decode("latin-1"), "vary": "Origin"}
        if scope["method"] == "OPTIONS" and _header(scope, b"access-control-request-method"):
            preflight = cors | {
                "access-control-allow-methods": "GET, POST",
                "access-control-allow-headers": CORS_HEADERS,
                "access-control-max-age": "600",
            }
            await Response(status_code=204, headers=preflight)(scope, receive, send)
            return

        async def cors_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(cors | {"access-control-expose-headers": "X-Request-Id, Retry-After"})
            await send(message)

        try:
            await self.app(scope, receive, cors_send)
        except AppError as error:  # answered here, so that the page may read why
            await error_response(error)(scope, receive, cors_send)


class Keys:
    """Asks for the API key, as a Bearer token or in X-Api-Key, on every route but the public ones."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key and not is_local(scope) and scope["path"] not in PUBLIC:
            given = [*_headers(scope, b"x-api-key"), *map(_bearer, _headers(scope, b"authorization"))]
            if not given:
                raise Unauthorized(
                    "an API key is required", hint="send it in the header Authorization: Bearer or X-Api-Key"
                )
            if not all(hmac.compare_digest(key, self.key) for key in given):
                raise Unauthorized("the API key is wrong")
        await self.app(scope, receive, send)


def _bearer(value: bytes) -> bytes:
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The header's value; None when it is missing or given more than once."""
    values = _headers(scope, name)
    return values[0] if len(values) == 1 else None
