"""Progress of a transfer: bytes by file and in total, speed and remaining time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..remote import RemoteFile

State = Literal["waiting", "downloading", "paused"]
SMOOTHING = 3.0  # seconds over which the speed is averaged


@dataclass(frozen=True, slots=True)
class FileProgress:
    """One file that is being transferred."""

    name: str
    size: int
    received: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a transfer at one moment. `files` has the unfinished files that have received bytes."""

    state: State
    received: int  # bytes of all files, with those of earlier attempts
    total: int
    files_complete: int
    files_total: int
    files: tuple[FileProgress, ...] = ()
    speed: float = 0.0  # bytes/s
    eta: float | None = None  # seconds; None: unknown
    arrived: int = 0  # bytes from the network in this process, with those that were downloaded again


class Meter:
    """Counts received bytes; safe for threads."""

    def __init__(self, files: Sequence[RemoteFile], clock: Callable[[], float] = time.monotonic) -> None:
        self._sizes = {file.name: file.size for file in files}
        self._total = sum(self._sizes.values())
        self._clock = clock
        self._lock = threading.Lock()
        self._active: dict[str, int] = {}  # name → received bytes
        self._complete: set[str] = set()
        self._complete_bytes = 0
        self._arrived = 0  # bytes from the network, which the speed counts
        self._speed = 0.0
        self._measured = (clock(), 0)  # time and `_arrived` of the last measurement

    def restore(self, name: str, count: int) -> None:
        """Bytes that are already on the disk."""
        with self._lock:
            self._active[name] = self._active.get(name, 0) + count

    def arrive(self, name: str, count: int) -> None:
        """Count bytes of a file that arrived from the network."""
        with self._lock:
            self._active[name] = self._active.get(name, 0) + count
            self._arrived += count

    def lose(self, name: str, count: int) -> None:
        """Subtract bytes of a file that must be downloaded again."""
        with self._lock:
            self._active[name] = max(0, self._active.get(name, 0) - count)

    def reset(self, name: str) -> None:
        """All bytes of the file must be downloaded again."""
        with self._lock:
            self._active.pop(name, None)

    def finish(self, name: str) -> None:
        with self._lock:
            self._active.pop(name, None)
            if name not in self._complete:
                self._complete.add(name)
                self._complete_bytes += self._sizes[name]

    def read(self, state: State) -> Progress:
        with self._lock:
            self._measure()
            received = self._complete_bytes + sum(self._active.values())
            rest = self._total - received
            files = tuple(FileProgress(name, self._sizes[name], count) for name, count in self._active.items())
            eta = rest / self._speed if self._speed > 1 and state == "downloading" else None
            return Progress(
                state,
                received,
                self._total,
                len(self._complete),
                len(self._sizes),
                files,
                self._speed if state == "downloading" else 0.0,
                eta,
                self._arrived,
            )

    def _measure(self) -> None:
        """Update the speed: an average that forgets exponentially."""
        now = self._clock()
        before, arrived = self._measured
        seconds = now - before
        if seconds < 0.05:
            return
        current = (self._arrived - arrived) / seconds
        weight = 1.0 if self._speed == 0 else min(1.0, seconds / SMOOTHING)
        self._speed += weight * (current - self._speed)
        self._measured = (now, self._arrived)
