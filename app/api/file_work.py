"""Hashing and copying of large files for clients: in threads, with progress, until the client disconnects."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from ..errors import StorageFailed
from ..paths import printable
from ..store.importing import import_model
from ..store.local import cache
from ..store.local.verify import files_of, verify_file
from .admin import FileProgress, FileVerdict, ImportBody, Imported, Verification
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


def verify(model: cache.ModelRef, progress: Progress) -> Verification:
    """Compare every file of a model with its hash. Raises StorageFailed if a file cannot be read."""
    try:
        return _verify(model, progress)
    except OSError as error:
        raise StorageFailed(f"cannot read the files of {model.id}: {error}") from error


def _verify(model: cache.ModelRef, progress: Progress) -> Verification:
    files = files_of(model)
    total = sum(path.stat().st_size for _, path in files if path.is_file())
    done = 0
    verdicts = []
    for name, path in files:
        progress(name, done, total)

        def add(count: int, name: str = name) -> None:
            nonlocal done
            done += count
            progress(name, done, total)

        verdicts.append(FileVerdict(**asdict(verify_file(name, path, add))))
    wrong = [verdict for verdict in verdicts if verdict.status in ("damaged", "missing")]
    problems = [f"{verdict.file} is {verdict.status}" for verdict in wrong]
    return Verification(id=model.id, ok=not problems, problems=problems, files=verdicts)


def import_folder(body: ImportBody, progress: Progress) -> Imported:
    """Add a folder to the store. Raises the errors of `import_model`."""
    model = import_model(Path(body.path), body.name, copy=body.copy, progress=progress)
    return Imported(id=model.id, path=printable(model.path), size=model.size)
