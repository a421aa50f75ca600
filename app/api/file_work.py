"""Hashing and copying of large files for clients: in threads, with progress, until the client disconnects."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..store.changes.importing import describe, import_model
from ..store.records import Imported
from .admin import FileProgress, ImportBody
from .events import Report
from .places import Places

RUNNING = 2
WAITING = 8
EVENT_SECONDS = 0.1  # minimum time between two events of progress

Progress = Callable[[str, int, int], None]  # gets the fields of FileProgress
Result = TypeVar("Result")


class Stopped(Exception):
    """The client has disconnected. Raised by a Progress, to end the work of a thread."""


class FileWork:
    """Runs functions in threads of their own: the event loop's own threads stay free for short work."""

    def __init__(self) -> None:
        self.places = Places("verify or import models", running=RUNNING, waiting=WAITING)
        self._threads = ThreadPoolExecutor(RUNNING, "file-work")

    async def run(self, work: Callable[[Progress], Result], report: Report) -> Result:
        """The result of `work`, which must call its Progress often. Raises Overloaded if too many requests wait."""
        async with self.places.enter():
            loop = asyncio.get_running_loop()
            notifier = _Notifier(lambda event: loop.call_soon_threadsafe(report, event))
            try:
                return await loop.run_in_executor(self._threads, work, notifier)
            finally:
                notifier.stop()


class _Notifier:
    """Passes progress on, at most one event in EVENT_SECONDS."""

    def __init__(self, send: Callable[[FileProgress], object]) -> None:
        self._send = send
        self._stopped = threading.Event()
        self._time = 0.0

    def stop(self) -> None:
        """Let the next call raise Stopped."""
        self._stopped.set()

    def __call__(self, file: str, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise Stopped
        now = time.monotonic()
        if now - self._time >= EVENT_SECONDS:
            self._time = now
            self._send(FileProgress(file, done, total))


def import_folder(body: ImportBody, progress: Progress) -> Imported:
    """Add a folder to the store. Raises the errors of `import_model`."""
    model = import_model(Path(body.path), body.name, copy=body.copy, progress=progress)
    return describe(model, copied=body.copy)
