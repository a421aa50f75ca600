"""Bounds the number of requests that do expensive work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..errors import Overloaded


class Places:
    """Lets a few requests run, and a few more wait. All others are refused."""

    def __init__(self, work: str, *, running: int, waiting: int) -> None:
        """`work`: the purpose of the requests, for the text of the error."""
        self._work = work
        self._limit = running + waiting
        self._entered = 0  # requests that run or wait
        self._semaphore = asyncio.Semaphore(running)

    def check(self) -> None:
        """Raises Overloaded if no request can enter now."""
        if self._entered >= self._limit:
            raise Overloaded(
                f"{self._entered} requests to {self._work} run or wait", hint="try again when one of them has ended"
            )

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Wait for a place, and occupy it. Raises Overloaded if too many requests wait already."""
        self.check()
        self._entered += 1
        try:
            async with self._semaphore:
                yield
        finally:
            self._entered -= 1
