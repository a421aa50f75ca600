"""The transport below httpx: bodies in large blocks, without a copy.

    head of a reply ── httpcore and h11 ── httpx.Response
    its body ──────── socket ── buffer ─── Response.iter_raw()

The transport of httpx passes a body through h11 in blocks of 64 KiB, which copies it three times while Python's lock
is held. Here h11 gets the head of a reply and the bytes that arrive with it. The socket writes the rest of the body to
the buffer of the transport.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

BLOCK_BYTES = 2**18
BLOCK_SECONDS = 0.05  # the time that a block waits for more bytes
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Route:
    """A server, and the proxy on the way to it."""

    scheme: str
    host: str
    port: int
    proxy: httpx.URL | None

    @property
    def is_forwarded(self) -> bool:
        """True if the proxy reads the requests. It passes encrypted requests through a tunnel."""
        return self.proxy is not None and self.scheme == "http"

    @property
    def encrypts_twice(self) -> bool:
        return self.proxy is not None and self.proxy.scheme == self.scheme == "https"


class Transport(httpx.BaseTransport):
    """Keeps one connection for each server. One thread sends requests; other threads may interrupt it.

    Blocks of a body are views of one buffer: a block is valid until the next one.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._routes: dict[tuple[str, bytes, int | None], Route] = {}
        self._idle: dict[Route, httpcore.NetworkStream] = {}
        self._lock = threading.Lock()
        self._active: httpcore.NetworkStream | None = None
        self._buffer = memoryview(bytearray(BLOCK_BYTES))
        self.interrupted = False  # requests end with an error until `restart`

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request and read the head of its reply. Raises the errors of httpx."""
        timeouts = request.extensions["timeout"]
        route = self._route(request.url)
        with _errors_of_httpx():
            stream = self._take_idle(route) or self._connect(route, timeouts)
            try:
                reply = _exchange(stream, _request(request, route))
            except BaseException:
                stream.close()
                raise
        body = _Body(self, route, stream, reply, timeouts["read"])
        return httpx.Response(reply.status, headers=reply.headers, stream=body, extensions=reply.extensions)

    def interrupt(self) -> None:
        """End the request in progress, and all requests until `restart`. Called by another thread."""
        self.interrupted = True
        self.shut_down()

    def restart(self) -> None:
        self.interrupted = False

    def shut_down(self) -> None:
        """End the request in progress with an error. Called by another thread."""
        with self._lock:
            if self._active is not None:
                with contextlib.suppress(OSError):
                    self._active.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, with that of a reply that is still open."""
        with self._lock:
            streams = [*self._idle.values(), *filter(None, [self._active])]
            self._idle.clear()
            self._active = None
        for stream in streams:
            stream.close()

    def release(self, route: Route, stream: httpcore.NetworkStream, *, reusable: bool) -> None:
        """End a request: keep its connection for the next one, or close it."""
        with self._lock:
            self._active = None
        if reusable:
            self._idle[route] = stream
        else:
            stream.close()

    def receive(
        self, stream: httpcore.NetworkStream, limit: int, timeout: float | None
    ) -> tuple[memoryview, Exception | None]:
        """Receive up to `limit` bytes. Returns the next block, and the error that ended it early."""
        connected: socket.socket = stream.get_extra_info("socket")
        limit = min(limit, BLOCK_BYTES)
        end = time.monotonic() + BLOCK_SECONDS
        size = 0
        try:
            connected.settimeout(timeout)
            while size < limit and (not size or time.monotonic() < end):
                count = connected.recv_into(self._buffer[size:limit])
                if not count:
                    return self._buffer[:size], httpx.RemoteProtocolError("the connection ended inside of a body")
                size += count
        except TimeoutError as error:
            return self._buffer[:size], httpx.ReadTimeout(str(error))
        except OSError as error:
            return self._buffer[:size], httpx.ReadError(str(error))
        return self._buffer[:size], None

    def _route(self, url: httpx.URL) -> Route:
        key = url.scheme, url.raw_host, url.port
        if key not in self._routes:
            host = url.raw_host.decode("ascii")
            self._routes[key] = Route(url.scheme, host, url.port or _default_port(url), _proxy_of(url))
        return self._routes[key]

    def _take_idle(self, route: Route) -> httpcore.NetworkStream | None:
        """The kept connection to a server, unless the server has closed it."""
        stream = self._idle.pop(route, None)
        if stream is not None and stream.get_extra_info("is_readable"):
            stream.close()
            return None
        if stream is not None:
            self._activate(stream)
        return stream

    def _connect(self, route: Route, timeouts: dict[str, Any]) -> httpcore.NetworkStream:
        """A new connection. Raises errors of httpcore."""
        timeout = timeouts["connect"]
        proxy = route.proxy
        if proxy is None:
            stream = httpcore.SyncBackend().connect_tcp(route.host, route.port, timeout)
        else:
            host = proxy.raw_host.decode("ascii")
            stream = httpcore.SyncBackend().connect_tcp(host, proxy.port or _default_port(proxy), timeout)
            if proxy.scheme == "https":
                stream = stream.start_tls(self._context, host, timeout)
        self._activate(stream)
        try:
            if proxy is not None and not route.is_forwarded:
                _open_tunnel(stream, route, proxy, timeouts)
            if route.scheme == "https":
                stream = stream.start_tls(self._context, route.host, timeout)
                self._activate(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    def _activate(self, stream: httpcore.NetworkStream) -> None:
        """`shut_down` ends the request on this connection."""
        with self._lock:
            self._active = stream
        if self.interrupted:
            self.shut_down()


class _Body(httpx.SyncByteStream):
    """The body of a reply. `close` keeps the connection if the body is complete."""

    def __init__(
        self,
        transport: Transport,
        route: Route,
        stream: httpcore.NetworkStream,
        reply: httpcore.Response,
        timeout: float | None,
    ) -> None:
        self._transport = transport
        self._route = route
        self._stream = stream
        self._reply = reply
        self._timeout = timeout
        self._complete = False
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._reply.stream, Iterable)
        blocks = iter(self._reply.stream)
        rest = self._length
        with _errors_of_httpx():
            if rest is None:
                yield from blocks
            elif rest:
                first = next(blocks)
                yield first
                if rest > len(first):
                    yield from self._receive(rest - len(first))
        self._complete = True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.release(self._route, self._stream, reusable=self._complete and self._is_kept)

    def _receive(self, rest: int) -> Iterator[bytes]:
        """The rest of the body, behind the bytes that h11 got with the head."""
        while rest:
            block, error = self._transport.receive(self._stream, rest, self._timeout)
            if block:
                yield block  # type: ignore[misc]  # every reader accepts a view
                rest -= len(block)
            if error is not None:
                raise error

    @property
    def _length(self) -> int | None:
        """Bytes of the body; None if h11 has to find its end, or if the socket has another layer of encryption."""
        fields = {name.lower(): value for name, value in self._reply.headers}
        has_body = self._reply.status in (200, 206)
        if not has_body or b"transfer-encoding" in fields or self._route.encrypts_twice:
            return None
        length = fields.get(b"content-length")  # h11 has checked that it is a number
        return None if length is None else int(length)

    @property
    def _is_kept(self) -> bool:
        closes = any(name.lower() == b"connection" and b"close" in value.lower() for name, value in self._reply.headers)
        return not closes and self._reply.extensions["http_version"] == b"HTTP/1.1"


class _Shared(httpcore.NetworkStream):
    """A connection that stays open when its httpcore connection closes."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        pass

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _exchange(stream: httpcore.NetworkStream, request: httpcore.Request) -> httpcore.Response:
    """Send a request and read the head of its reply. Each request has its own h11 state."""
    return httpcore.HTTP11Connection(request.url.origin, _Shared(stream)).handle_request(request)


def _request(request: httpx.Request, route: Route) -> httpcore.Request:
    """The request for a server, or for the proxy that forwards it."""
    headers = list(request.headers.raw)
    target = request.url.raw_path
    if route.proxy is not None and route.is_forwarded:
        headers += _authorization(route.proxy)
        target = str(request.url).encode("ascii")
    url = httpcore.URL(scheme=route.scheme, host=route.host, port=route.port, target=target)
    return httpcore.Request(request.method, url, headers=headers, content=request.stream, extensions=request.extensions)


def _open_tunnel(stream: httpcore.NetworkStream, route: Route, proxy: httpx.URL, timeouts: dict[str, Any]) -> None:
    """Make a proxy pass all bytes to the server. Raises httpcore.ProxyError."""
    host = f"[{route.host}]" if ":" in route.host else route.host
    target = f"{host}:{route.port}".encode("ascii")
    url = httpcore.URL(scheme=proxy.scheme, host=proxy.raw_host, port=proxy.port, target=target)
    headers: Headers = [(b"Host", target), (b"Accept", b"*/*"), *_authorization(proxy)]
    reply = _exchange(stream, httpcore.Request("CONNECT", url, headers=headers, extensions={"timeout": timeouts}))
    if not 200 <= reply.status < 300:
        raise httpcore.ProxyError(f"the proxy {proxy.host} returned status {reply.status}")


def _proxy_of(url: httpx.URL) -> httpx.URL | None:
    """The proxy that the environment names for an address. Raises httpx.UnsupportedProtocol."""
    proxies = getproxies()
    address = proxies.get(url.scheme) or proxies.get("all")
    if not address or proxy_bypass(url.host):
        return None
    proxy = httpx.URL(address if "://" in address else f"http://{address}")
    if proxy.scheme not in ("http", "https"):
        raise httpx.UnsupportedProtocol(f"the proxy {proxy.host} has the scheme {proxy.scheme}, not http or https")
    return proxy


def _authorization(proxy: httpx.URL) -> Headers:
    if not proxy.username:
        return []
    account = f"{proxy.username}:{proxy.password}".encode()
    return [(b"Proxy-Authorization", b"Basic " + base64.b64encode(account))]


def _default_port(url: httpx.URL) -> int:
    return {"http": 80, "https": 443}[url.scheme]


@contextlib.contextmanager
def _errors_of_httpx() -> Iterator[None]:
    """Raise errors of httpcore as the errors of httpx with the same name."""
    try:
        yield
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError) as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error
