"""HTTP requests of a transfer: redirects, access tokens and checked replies.

    open() ── hub (Authorization) ── 302 ── content server (no Authorization) ── Reply

A token is sent only to the origin (scheme, host and port) that it belongs to. Each worker has one Connection, because
a shared pool of httpx has one lock.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from ...version import VERSION
from .failures import Changed, Interrupted, Refused, Transient, WithoutRanges, check_status, server_of, translate
from .policy import Policy
from .transport import Transport

MAX_REDIRECTS = 8
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE)
AGENT = f"localllm/{VERSION}"


def origin(url: httpx.URL | str) -> str:
    """Scheme, host and port of an address."""
    url = httpx.URL(url)
    port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
    return f"{url.scheme}://{url.host}:{port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Headers with access tokens, by the origin that they belong to. The representation shows no token."""

    headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)

    def of(self, url: httpx.URL) -> dict[str, str]:
        return dict(self.headers.get(origin(url), {}))


@cache
def _certificates() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Reply:
    """A checked reply, whose body begins at `start` in the file."""

    def __init__(self, response: httpx.Response, start: int) -> None:
        self.start = start
        self._response = response

    @property
    def etag(self) -> str:
        return str(self._response.headers.get("etag", ""))

    def blocks(self) -> Iterator[bytes]:
        """The body as it arrives; a block is valid until the next one.

        Raises Transient for an error of the network or an incomplete body.
        """
        server = server_of(self._response.request.url)
        try:
            yield from self._response.iter_raw()
        except httpx.HTTPError as error:
            raise translate(error, server) from error

    def close(self) -> None:
        with contextlib.suppress(httpx.HTTPError, OSError):
            self._response.close()


class Connection:
    """The HTTP client of one worker. Another thread may interrupt it; every other method belongs to the worker.

    `targets` (address of a file → target of its redirects) may be shared by several connections.
    """

    def __init__(self, policy: Policy, credentials: Credentials, targets: dict[str, httpx.URL] | None = None) -> None:
        self._policy = policy
        self._credentials = credentials
        self._targets = {} if targets is None else targets
        self._expired = False
        self._transport = Transport(_certificates())
        timeout = httpx.Timeout(policy.stall_timeout, connect=policy.connect_timeout)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        self._client = httpx.Client(
            transport=self._transport, timeout=timeout, follow_redirects=False, cookies=no_cookies
        )

    def open(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        seen: Callable[[httpx.Response], None] = lambda response: None,
    ) -> httpx.Response:
        """Request an address; follow redirects. The body of the response is not yet read.

        `seen` gets every response, also those that redirect. Raises Transient, Refused or Interrupted.
        """
        target = self._targets.get(url)
        address = target or _address(url)
        for _ in range(MAX_REDIRECTS):
            response = self._send(address, headers or {})
            seen(response)
            location = response.headers.get("location")
            if response.status_code not in (301, 302, 303, 307, 308) or not location:
                break
            response.close()
            address = _redirect(address, location)
        else:
            raise Refused(f"{address.host} redirects in a loop")
        self._remember(url, address)
        try:
            check_status(response, self._policy, redirected=str(address) != url)
        except (Transient, Refused):
            self._targets.pop(url, None)
            response.close()
            raise
        return response

    def open_range(self, url: str, start: int, end: int, size: int, *, skip: bool = False) -> Reply:
        """Request the bytes `start` to `end` (exclusive) of a file with `size` bytes.

        With `skip`, a reply with the complete file is accepted for any range; its body begins at byte 0.

        Raises Transient, Refused, Changed (another file size), WithoutRanges or Interrupted.
        """
        is_complete = start == 0 and end == size
        headers = {} if is_complete else {"Range": f"bytes={start}-{end - 1}"}
        response = self.open(url, headers)
        try:
            return Reply(response, _body_start(response, start, end, size, skip))
        except BaseException:
            response.close()
            raise

    def interrupt(self) -> None:
        """End the request in progress: its thread gets Interrupted. Called by another thread."""
        self._transport.interrupt()

    def expire(self) -> None:
        """End the request in progress: its thread gets Transient. Called by another thread."""
        self._expired = True
        self._transport.shut_down()

    def restart(self) -> None:
        """Allow requests again after an interruption."""
        self._transport.restart()
        self._expired = False

    @property
    def interrupted(self) -> bool:
        return self._transport.interrupted

    def close(self) -> None:
        self._client.close()

    def _remember(self, url: str, address: httpx.URL) -> None:
        if str(address) != url:
            if len(self._targets) >= 64:
                self._targets.clear()
            self._targets[url] = address

    def _send(self, address: httpx.URL, headers: Mapping[str, str]) -> httpx.Response:
        if self.interrupted:
            raise Interrupted
        request = self._client.build_request(
            "GET",
            address,
            headers={
                "User-Agent": AGENT,
                "Accept-Encoding": "identity",
                **headers,
                **self._credentials.of(address),
            },
        )
        try:
            return self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if self.interrupted:
                raise Interrupted from error
            if self._expired:
                self._expired = False
                raise Transient(f"{address.host} sent no reply for too long") from error
            raise translate(error, server_of(address)) from error


def get_json(url: str, policy: Policy, credentials: Credentials, parse: Callable[[bytes], Any], limit: int) -> Any:
    """The parsed body of an address, up to `limit` bytes. Raises Transient, Refused, or ValueError from `parse`."""
    connection = Connection(policy, credentials)
    try:
        reply = Reply(connection.open(url), 0)
        body = bytearray()
        for block in reply.blocks():
            body += block
            if len(body) > limit:
                raise Refused(f"the reply of {httpx.URL(url).host} is longer than {limit} bytes")
        return parse(bytes(body))
    finally:
        connection.close()


def _address(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise Refused(f"malformed address: {error}") from error


def _redirect(address: httpx.URL, location: str) -> httpx.URL:
    """The target of a redirect. Raises Refused for a target without encryption if the address has it."""
    try:
        target = address.join(location)
    except httpx.InvalidURL as error:
        raise Refused(f"{address.host} redirects to a malformed address") from error
    if target.scheme not in ("http", "https") or not target.host:
        raise Refused(f"{address.host} redirects to an address of another kind")
    if address.scheme == "https" and target.scheme != "https":
        raise Refused(f"{address.host} redirects to {target.host} without encryption")
    return target


def _body_start(response: httpx.Response, start: int, end: int, size: int, skip: bool) -> int:
    """The position in the file where the body begins. Raises an error if the body is not the requested range."""
    host = response.request.url.host
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Transient(f"{host} sent the file with the encoding {encoding[:40]!r}")
    length = response.headers.get("content-length", "")
    if response.status_code == 200:
        if length.isdigit() and int(length) != size:
            raise Changed(f"{host} sent {length} bytes instead of {size}")
        if start and not skip:
            raise WithoutRanges(f"{host} ignores ranges")
        return 0
    _check_range(response, start, end, size)
    return start


def _check_range(response: httpx.Response, start: int, end: int, size: int) -> None:
    host = response.request.url.host
    match = CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if match is None:
        raise Transient(f"{host} sent a range without its position")
    first, last, total = int(match[1]), int(match[2]), match[3]
    if total != "*" and int(total) != size:
        raise Changed(f"the file at {host} has {total} bytes instead of {size}")
    if first != start or last != end - 1:
        raise Transient(f"{host} sent the bytes {first}-{last} instead of {start}-{end - 1}")
