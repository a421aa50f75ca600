"""Sends the frames of a worker to the daemon, with a limit on the unsent output."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from .. import frames

OUTPUT_HIGH = 4 * 2**20  # unsent bytes above which the engine waits
STEPS_AHEAD = 64  # steps whose deltas may wait for the event loop


class Outbox:
    """Sends frames. If the daemon does not read, the engine waits, and the event loop does not.

    Each step takes a permit on the engine's thread (`enter`). The loop returns the permit (`leave`) after it sent the
    output of the step, or later, when the unsent output is below OUTPUT_HIGH.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._permits = threading.Semaphore(STEPS_AHEAD)
        self._owed = 0  # permits to return when the output has drained
        self._open = False  # `enter` does not wait any more
        self._draining: asyncio.Task[None] | None = None
        writer.transport.set_write_buffer_limits(high=OUTPUT_HIGH)

    def send(self, *out: frames.Frame) -> None:
        """Send frames. Call it on the loop."""
        if out and not self._writer.is_closing():
            self._writer.write(b"".join(frames.pack(frame) for frame in out))

    def enter(self) -> None:
        """Wait for a permit. Call it on the engine's thread, before the deltas of a step go to the loop."""
        if not self._open:
            self._permits.acquire()

    def leave(self) -> None:
        """Return a permit. Call it on the loop, once for each `enter`, after `send` of the step's output."""
        self._owed += 1
        if self._writer.transport.get_write_buffer_size() < OUTPUT_HIGH:
            self._repay()
        elif self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._repay_when_drained())

    def let_all_pass(self) -> None:
        """Let `enter` return at once from now on: the worker ends, and the engine's thread must not wait."""
        self._open = True
        self._permits.release()

    async def flush(self) -> None:
        """Wait until the daemon has read the output, at most one second."""
        self._writer.transport.set_write_buffer_limits(high=0)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1.0):
                await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def _repay(self) -> None:
        permits = self._owed
        self._owed = 0
        if permits:
            self._permits.release(permits)

    async def _repay_when_drained(self) -> None:
        with contextlib.suppress(ConnectionError):  # `Worker._read` ends the worker
            await self._writer.drain()
        self._draining = None
        self._repay()
