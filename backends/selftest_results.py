"""Cached verdicts of the kernels' self-tests: one file per device, dtype and set of versions. Uses no tensor library.

While a process tests, a second file names the kernel under test. A process that crashes leaves the name there. After
one crash the kernel may be right, as somebody may have killed the process. After two in a row it counts as broken.
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
class SelfTestResults:
    """Verdicts by "op: implementation", cached in a file. An empty verdict is a pass."""

    file: Path
    device: str  # display name
    verdicts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, device: str) -> SelfTestResults:
        """The contents of the file; no verdicts if the file is missing or not readable."""
        try:
            verdicts = json.loads(file.read_text("utf-8"))["verdicts"]
            return cls(file, device, {str(key): str(reason) for key, reason in verdicts.items()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls(file, device)

    def write(self, fallbacks: Sequence[str] = ()) -> None:
        """Write the file atomically. If the folder is not writable, the next start tests again."""
        date = datetime.now(UTC).date().isoformat()
        contents = {"device": self.device, "date": date, "fallbacks": list(fallbacks), "verdicts": self.verdicts}
        beside = self.file.with_suffix(".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(contents, indent=1), "utf-8")
            beside.replace(self.file)
        except OSError:
            with suppress(OSError):
                beside.unlink()


class CrashMark:
    """A file with the name of the kernel under test: written before the test, deleted after the last test. If another
    process has locked the file, this process writes no name. `left` is the kernel in whose test an earlier process
    crashed, empty: none. `twice` says whether two processes in a row crashed in the test of this kernel."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock: int | None = None  # the system releases the lock when the process ends or crashes
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
        """Write the name of the kernel under test; do nothing if the folder is not writable."""
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
                raise OSError("another process deleted the file")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the file, also after an error: the process did not crash."""
        if self._lock is not None or self.left:
            with suppress(OSError):
                if self._lock is not None:
                    os.ftruncate(self._lock, 0)  # for a process that has opened the deleted file
                self._file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)


def newest(folder: Path) -> dict[str, str]:
    """For doctor: device name -> outcome of its newest self-test."""
    outcomes: list[tuple[float, str, str]] = []
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # corrupt, or deleted in the meantime
            contents = json.loads(file.read_text("utf-8"))
            outcome = "; ".join(contents["fallbacks"]) or f"all {len(contents['verdicts'])} kernels are right"
            outcomes.append((file.stat().st_mtime, str(contents["device"]), f"{outcome} ({contents['date']})"))
    return {device: outcome for _, device, outcome in sorted(outcomes)}
