"""Sends the frames of a worker to the daemon, with a limit on the unsent output."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from .. import frames

OUTPUT_HIGH = 4 * 2**20  # bytes; if more output is unsent, the engine waits
STEPS_AHEAD = 64  # number of steps whose deltas may wait for the event loop


class Outbox:
    """Sends frames. If the daemon does not read, the engine waits, and the event loop does not.

    Each step takes a permit on the engine's thread (`enter`). The loop returns the permit (`leave`) after it sent the
    output of the step, or later, when the unsent output is below OUTPUT_HIGH.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._permits = threading.Semaphore(STEPS_AHEAD)
        self._due = 0  # number of permits to return when the daemon has read the output
        self._open = False  # True: `enter` never waits
        self._draining: asyncio.Task[None] | None = None
        writer.transport.set_write_buffer_limits(high=OUTPUT_HIGH)

    def send(self, *output: frames.Frame) -> None:
        """Send frames. Must run on the event loop."""
        if output and not self._writer.is_closing():
            self._writer.write(b"".join(frames.pack(frame) for frame in output))

    def enter(self) -> None:
        """Wait for a permit. Must run on the engine's thread, before the deltas of a step go to the event loop."""
        if not self._open:
            self._permits.acquire()

    def leave(self) -> None:
        """Return a permit. Must run on the event loop, once for each `enter`, after `send` of the step's output."""
        self._due += 1
        if self._writer.transport.get_write_buffer_size() < OUTPUT_HIGH:
            self._release()
        elif self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._release_when_drained())

    def stop_waiting(self) -> None:
        """From now on, `enter` returns at once: the worker ends, and the engine's thread must not wait."""
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

    def _release(self) -> None:
        permits = self._due
        self._due = 0
        if permits:
            self._permits.release(permits)

    async def _release_when_drained(self) -> None:
        with contextlib.suppress(ConnectionError):  # `Worker._read` ends the worker
            await self._writer.drain()
        self._draining = None
        self._release()
