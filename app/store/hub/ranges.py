"""Fetches ranges of remote files: the headers of weights, without their data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from ...errors import DownloadFailed
from ..remote import RemoteFile
from ..transfer.failures import Changed, Interrupted, Refused, Transient, WithoutRanges, wait_before
from ..transfer.http import Connection, Credentials
from ..transfer.policy import Policy, from_environment
from .hubs import GATED_HINT, RETRY_HINT, credentials


@contextmanager
def range_requests(policy: Policy | None = None) -> Iterator[Ranges]:
    """Requests of ranges of the files of `lookup`. Threads may share them. They end at the end of the context."""
    ranges = Ranges(policy or from_environment(), credentials())
    try:
        yield ranges
    finally:
        ranges.interrupt()
        ranges.close()


class Ranges:
    """Connections that wait for requests. Each request takes one, or opens another. This is a skeleton.Fetch."""

    def __init__(self, policy: Policy, tokens: Credentials) -> None:
        self._policy = policy
        self._tokens = tokens
        self._all: list[Connection] = []
        self._idle: list[Connection] = []
        self._ended = Event()

    def interrupt(self) -> None:
        """End all requests: their threads get Interrupted."""
        self._ended.set()
        for connection in list(self._all):
            connection.interrupt()

    def __call__(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """`length` bytes of a file, from its address or a mirror. Raises DownloadFailed, or Interrupted."""
        connection = self._take()
        failures: list[Exception] = []
        try:
            for url in (file.url, *file.mirrors):
                try:
                    return self._fetch_from(connection, url, file, offset, length)
                except (Transient, Refused, Changed, WithoutRanges) as failure:
                    failures.append(failure)
        finally:
            self._idle.append(connection)
        if self._ended.is_set():
            raise Interrupted
        first = failures[0]
        is_denied = isinstance(first, Refused) and first.status in (401, 403)
        raise DownloadFailed(f"cannot read {file.name}: {first}", hint=GATED_HINT if is_denied else RETRY_HINT)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _take(self) -> Connection:
        if self._idle:
            return self._idle.pop()
        connection = Connection(self._policy, self._tokens)
        self._all.append(connection)
        if self._ended.is_set():
            connection.interrupt()
        return connection

    def _fetch_from(self, connection: Connection, url: str, file: RemoteFile, offset: int, length: int) -> bytes:
        """Request a range until an attempt succeeds. Raises the failure of the last attempt, or Interrupted."""
        for attempt in range(2, self._policy.lookup_attempts + 1):
            try:
                return self._request(connection, url, file, offset, length)
            except Transient as failure:
                if self._ended.wait(wait_before(attempt, failure, self._policy)):
                    raise Interrupted from failure
        return self._request(connection, url, file, offset, length)

    def _request(self, connection: Connection, url: str, file: RemoteFile, offset: int, length: int) -> bytes:
        deadline = time.monotonic() + self._policy.lookup_timeout
        reply = connection.open_range(url, offset, offset + length, file.size, skip=True)
        stop = offset + length - reply.start  # a server without ranges sends the file from its beginning
        body = bytearray()
        try:
            for block in reply.blocks():
                body += block
                if len(body) >= stop:
                    return bytes(body[stop - length : stop])
                if time.monotonic() > deadline:
                    raise Transient(f"{file.name} arrives too slowly")
        finally:
            reply.close()
        raise Transient(f"{file.name} ended after {reply.start + len(body)} bytes")
