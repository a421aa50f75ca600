"""What a worker says to the daemon, without letting it pile up."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from . import frames

OUTPUT_HIGH = 4 * 2**20  # bytes waiting for the daemon above which the engine is made to wait
STEPS_AHEAD = 64  # steps whose deltas may wait for the loop


class Outbox:
    """Sends frames; a daemon that does not read stops the engine, not the loop.

    Each step takes a permit on the engine's thread (`enter`) and gives it back on the loop (`leave`) when its output is
    on its way, which it is not while too much is waiting already.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._permits = threading.Semaphore(STEPS_AHEAD)
        self._owed = 0  # permits to give back once the output has drained
        self._open = False  # nobody waits for permits any more
        self._draining: asyncio.Task[None] | None = None
        writer.transport.set_write_buffer_limits(high=OUTPUT_HIGH)

    def send(self, *out: frames.Frame) -> None:
        """On the loop."""
        if out and not self._writer.is_closing():
            self._writer.write(b"".join(frames.pack(frame) for frame in out))

    def enter(self) -> None:
        """On the engine's thread, before a step's deltas go to the loop: waits for a permit."""
        if not self._open:
            self._permits.acquire()

    def leave(self) -> None:
        """On the loop, once for each `enter`, after what the step gave was sent."""
        self._owed += 1
        if self._writer.transport.get_write_buffer_size() < OUTPUT_HIGH:
            self._repay()
        elif self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._repay_when_drained())

    def let_all_pass(self) -> None:
        """The worker ends: the engine's thread must not be waiting here."""
        self._open = True
        self._permits.release()

    async def flush(self) -> None:
        """Let the last words out, for a daemon that reads them."""
        self._writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def _repay(self) -> None:
        owed, self._owed = self._owed, 0
        if owed:
            self._permits.release(owed)

    async def _repay_when_drained(self) -> None:
        with contextlib.suppress(ConnectionError):  # the reading side ends the worker
            await self._writer.drain()
        self._draining = None
        self._repay()
