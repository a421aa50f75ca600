"""What a worker answers to one client request, on its way to that client: bounded, cancellable, ended once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from ..errors import AppError, Overloaded
from .frames import Failed, Finished, FromWorker, Piece, Started, Stats, Text, Tokens

# Pieces and log-probabilities a client may leave unread. What a sleeping client costs is bounded by this.
MAX_UNREAD = 32_768

Reply = Piece | Finished | Tokens | Text | Stats


class Stream:
    """Replies to a group of frames sent together. One reader; use as an async context manager.

    Leaving the context cancels what still runs.
    """

    def __init__(self, ids: Sequence[str], weight: int, on_close: Callable[[Stream], None]) -> None:
        self.ids, self.weight = tuple(ids), weight
        self.running = set(ids)  # frames whose last reply has not come
        self.prompt_tokens = 0  # of all that have started
        self._unstarted = set(ids)
        self._replies: list[Reply] = []
        self._unread = 0
        self._error: AppError | None = None
        self._news = asyncio.Event()
        self._on_close = on_close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._on_close(self)

    async def started(self) -> None:
        """Returns once every frame was accepted. Raises the error of one that was not."""
        while self._unstarted and not self._error and not self._replies:
            await self._wait()
        if self._error and not self._replies:
            raise self._error

    async def take(self) -> list[Reply]:
        """All replies there are, at least one; empty when everything has ended. Raises the error that ended it."""
        while not self._replies:
            if self._error:
                raise self._error
            if not self.running:
                return []
            await self._wait()
        replies, self._replies, self._unread = self._replies, [], 0
        return replies

    def put(self, frame: FromWorker) -> None:
        """Take in a worker's frame about one of the ids."""
        match frame:
            case Started():
                self._unstarted.discard(frame.id)
                self.prompt_tokens += frame.prompt_tokens
            case Failed():
                self.fail(frame.fault.error())
                self.running.discard(frame.id)
            case Piece():
                self._replies.append(frame)
                self._unread += 1 + sum(1 + len(entry.top) for entry in frame.logprobs)
                if self._unread > MAX_UNREAD and not self._error:
                    self.fail(Overloaded("the client reads too slowly; the answer was cancelled"))
                    self._on_close(self)
            case Finished() | Tokens() | Text() | Stats():
                self._unstarted.discard(frame.id)
                self.running.discard(frame.id)
                self._replies.append(frame)
        self._news.set()

    def fail(self, error: AppError) -> None:
        """End it with an error; the first one counts."""
        self._error = self._error or error
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
