"""Buffers the replies of a worker to one client request, with a limit, until the client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from ..errors import AppError, Overloaded
from ..frames import (
    AdapterLoaded,
    AdapterUnloaded,
    Embedded,
    Failed,
    Finished,
    FromWorker,
    ModelInfo,
    Piece,
    Started,
    Stats,
    Text,
    Tokens,
)

# Maximum number of unread pieces and log-probabilities: it limits the memory that a slow client uses.
MAX_UNREAD = 32_768

Reply = Piece | Embedded | Finished | Tokens | Text | AdapterLoaded | AdapterUnloaded | Stats


class Stream:
    """The replies to a group of frames, for one reader. Use it as an async context manager.

    At exit, the requests that still run are cancelled.
    """

    def __init__(self, info: ModelInfo, ids: Sequence[str], weight: int, on_close: Callable[[Stream], None]) -> None:
        self.info = info
        self.ids = tuple(ids)
        self.weight = weight
        self.adapter = ""  # name of the adapter of the requests; empty: the base model
        self.running = set(ids)  # ids that still expect replies
        self.prompt_tokens = 0  # sum over all started requests
        self.warnings: list[str] = []  # of the started requests, for the user
        self.ignored: list[str] = []  # of the started requests: see Started
        self._unstarted = set(ids)
        self._replies: list[Reply] = []
        self._unread = 0
        self._woken = False
        self._error: AppError | None = None
        self._news = asyncio.Event()
        self._on_close = on_close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._on_close(self)

    async def started(self) -> None:
        """Wait until the worker has started every request. Raises the error of a refused request."""
        while self._unstarted and not self._error and not self._replies:
            await self._wait()
        if self._error and not self._replies:
            raise self._error

    async def take(self) -> list[Reply]:
        """All unread replies; waits until there is one. Empty after the last reply. Raises the error of the stream, or
        TimeoutError after `wake`."""
        while not self._replies:
            if self._error:
                raise self._error
            if not self.running:
                return []
            if self._woken:
                self._woken = False
                raise TimeoutError
            await self._wait()
        replies = self._replies
        self._replies = []
        self._unread = 0
        self._woken = False
        return replies

    def wake(self) -> None:
        """Let a call of `take` that waits, or the next one, raise TimeoutError unless there are replies."""
        self._woken = True
        self._news.set()

    def put(self, frame: FromWorker) -> None:
        """Add a frame that the worker sent for one of the request ids."""
        match frame:
            case Piece():
                self._add(frame)
            case Started():
                self._unstarted.discard(frame.id)
                self.prompt_tokens += frame.prompt_tokens
                self.warnings += [warning for warning in frame.warnings if warning not in self.warnings]
                self.ignored += [name for name in frame.ignored if name not in self.ignored]
            case Failed():
                self.fail(frame.fault.error())
                self.running.discard(frame.id)
            case Embedded():
                self._replies.append(frame)
            case Finished() | Tokens() | Text() | AdapterLoaded() | AdapterUnloaded() | Stats():
                self._unstarted.discard(frame.id)
                self.running.discard(frame.id)
                self._replies.append(frame)
        self._news.set()

    def _add(self, piece: Piece) -> None:
        """Add a piece; with too many unread ones, cancel the answer."""
        self._replies.append(piece)
        self._unread += 1
        if piece.logprobs:
            self._unread += sum(1 + len(entry.top) for entry in piece.logprobs)
        if self._unread > MAX_UNREAD and not self._error:
            self.fail(Overloaded("the client reads too slowly; the answer was cancelled"))
            self._on_close(self)

    def fail(self, error: AppError) -> None:
        """End the stream with an error. Later errors have no effect."""
        self._error = self._error or error
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
