"""What self-tests of kernels found, as it is kept between starts: a file for each device, number format and set of
versions. Reading it takes no tensor library.

Beside it, while a process tests, a file names the kernel under test: a process that ends over it leaves the name there.
Once, it may have been stopped from outside; a kernel that is left twice in a row is to blame.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(slots=True)
class Findings:
    """Verdicts by op and implementation, kept in a file; an empty one is a pass."""

    file: Path
    device: str  # for people
    verdicts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, device: str) -> Findings:
        """What the file holds; nothing where there is none, or none that can be read."""
        try:
            verdicts = json.loads(file.read_text("utf-8"))["verdicts"]
            return cls(file, device, {str(key): str(reason) for key, reason in verdicts.items()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls(file, device)

    def write(self, fallbacks: Sequence[str] = ()) -> None:
        """Where the folder cannot be written, the next start tests again."""
        date = datetime.now(UTC).date().isoformat()
        told = {"device": self.device, "date": date, "fallbacks": list(fallbacks), "verdicts": self.verdicts}
        beside = self.file.with_suffix(".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(told, indent=1), "utf-8")
            beside.replace(self.file)
        except OSError:
            with suppress(OSError):
                beside.unlink()


class UnderTest:
    """The name of what this process tests just now, on the disk before the test begins and gone when it ends, as long
    as no other process has its own there. `left` is what a process tested when it ended, empty: none did; `twice`:
    so did the one before it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock: int | None = None  # the kernel gives it up with the process, however that ends
        self.left = ""
        self.twice = False

    def __enter__(self) -> Self:
        with suppress(OSError):
            descriptor = os.open(self._file, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.left, _, again = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").partition("\n")
                self.twice = bool(again)
            finally:
                os.close(descriptor)
        return self

    def name(self, title: str) -> None:
        """Where the folder cannot be written, nothing is."""
        with suppress(OSError):
            if self._lock is None:
                self._lock = self._locked()
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{title}\nagain".encode() if title == self.left else title.encode(), 0)
            os.fsync(self._lock)

    def _locked(self) -> int:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self._file.stat()):
                raise OSError("another process removed it meanwhile")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An error that was raised did not end the process."""
        if self._lock is not None or self.left:
            with suppress(OSError):
                if self._lock is not None:
                    os.ftruncate(self._lock, 0)  # for a process that has opened it and waits for the lock
                self._file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)


def told(folder: Path) -> dict[str, str]:
    """For people: the outcome of the newest self-test on each device, by its name."""
    found: list[tuple[float, str, str]] = []
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # broken, or gone meanwhile
            kept = json.loads(file.read_text("utf-8"))
            outcome = "; ".join(kept["fallbacks"]) or f"all {len(kept['verdicts'])} kernels are right"
            found.append((file.stat().st_mtime, str(kept["device"]), f"{outcome} ({kept['date']})"))
    return {device: outcome for _, device, outcome in sorted(found)}
