"""The middleware around the routes, from the outermost to the innermost:

    Traced     adds a request id, writes a line to the log
    Paths      normalises slashes: /v1//models/ is /v1/models
    Errors     converts exceptions to the error body of the protocol
    Heads      limits the size of request line and headers
    Hosts      accepts only names of this machine in the Host header  (against DNS rebinding)
    Origins    accepts only listed origins of web pages               (against cross-site requests)
    Keys       checks the API key, if one is set

Hosts, Origins and Keys do not check requests over the unix socket: its file mode and the user id of the client protect
the socket, and browsers cannot use it.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.body import ClientGone, is_local
from ..api.replies import error_response
from ..errors import AppError, Forbidden, InvalidRequest, Unauthorized
from ..origins import host_name, origin
from .connection import MAX_HEAD

log = logging.getLogger(__name__)

PUBLIC = {"/health"}  # routes that need no key
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
CORS_HEADERS = (
    "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Stainless-Arch, X-Stainless-Async, X-Stainless-Lang, "
    "X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Read-Timeout, X-Stainless-Retry-Count, "
    "X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, X-Stainless-Helper-Method, "
    "Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access"
)

EXPOSED = "X-Request-Id, X-Localllm-Ignored, Retry-After"


class Traced:
    """Adds the headers X-Request-Id and Request-Id to responses: the id of the client, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = REQUEST_ID.fullmatch(_header(scope, b"x-request-id") or b"")
        request_id = match[0].decode() if match else f"req-{uuid.uuid4().hex}"
        started = time.perf_counter()
        status = 499  # status in the log if the client disconnects before the response

        async def traced_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # the names of OpenAI and Anthropic
            await send(message)

        try:
            await self.app(scope, receive, traced_send)
        finally:
            milliseconds = (time.perf_counter() - started) * 1000
            log.info("%s %s %.200r %d %.1f ms", request_id, scope["method"], scope["path"], status, milliseconds)


class Paths:
    """Replaces repeated slashes of the path by one, and removes a trailing slash."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = re.sub("/{2,}", "/", scope["path"])
        await self.app({**scope, "path": path.rstrip("/") or "/"}, receive, send)


class Errors:
    """Converts exceptions to responses. An unexpected exception goes to the log; the client sees no detail of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
            return
        except ClientGone:
            return
        except AppError as raised:
            error = raised
        except Exception:
            log.exception("internal error in %s", scope["path"])
            error = AppError("internal error in the daemon; see its log")
        if not started:
            await error_response(error, scope["path"])(scope, receive, send)


class Heads:
    """Refuses a request line and headers larger than MAX_HEAD.

    The connection also checks this limit, but only while headers are incomplete: it misses headers that arrive at once.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > MAX_HEAD:
            raise InvalidRequest(f"the request line and the headers exceed the limit of {MAX_HEAD} bytes")
        await self.app(scope, receive, send)


class Hosts:
    """Refuses a Host header unless it is a loopback name or address, the local address of the connection, or an allowed
    name. A web page whose name resolves to this machine (DNS rebinding) sends its own name and is refused."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = {"localhost"} | {_canonical(name, host_name) for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_local(scope) and not self._accepts(_header(scope, b"host") or b"", scope["server"][0]):
            raise Forbidden(
                "the Host header is not a name of this machine",
                hint="to accept more names, use the setting allowed_hosts",
            )
        await self.app(scope, receive, send)

    def _accepts(self, header: bytes, local_address: str) -> bool:
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
        local = ipaddress.ip_address(local_address.split("%")[0])
        if isinstance(local, ipaddress.IPv6Address) and local.ipv4_mapped:
            local = local.ipv4_mapped
        return address.is_loopback or address == local or str(address) in self.allowed


class Origins:
    """Refuses requests of web pages (requests with the header Origin) unless their origin is allowed."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self.app = app
        self.allowed = {_canonical(name, origin).encode() for name in allowed}

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
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-allow-headers": CORS_HEADERS,
                "access-control-max-age": "600",
            }
            await Response(status_code=204, headers=preflight)(scope, receive, send)
            return

        async def cors_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(cors | {"access-control-expose-headers": EXPOSED})
            await send(message)

        try:
            await self.app(scope, receive, cors_send)
        except AppError as error:  # a page can read an error only if the response has CORS headers
            await error_response(error, scope["path"])(scope, receive, cors_send)


class Keys:
    """Requires the API key, as Bearer token or in X-Api-Key, on all routes except PUBLIC."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.key and not is_local(scope) and scope["path"] not in PUBLIC:
            keys = [*_headers(scope, b"x-api-key"), *map(_bearer, _headers(scope, b"authorization"))]
            if not keys:
                raise Unauthorized(
                    "an API key is required", hint="send it in the header Authorization: Bearer or X-Api-Key"
                )
            if not all(hmac.compare_digest(key, self.key) for key in keys):
                raise Unauthorized("the API key is wrong")
        await self.app(scope, receive, send)


def _canonical(text: str, convert: Callable[[str], str]) -> str:
    """A name as requests have it. The check of the settings refuses a text that `convert` does not accept; the names of
    this machine may be such texts."""
    try:
        return convert(text)
    except ValueError:
        return text.lower()


def _bearer(value: bytes) -> bytes:
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _header(scope: Scope, name: bytes) -> bytes | None:
    """The value of a header; None if it is missing or occurs more than once."""
    values = _headers(scope, name)
    return values[0] if len(values) == 1 else None
