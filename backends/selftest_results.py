"""Cached results of the kernels' self-tests: one file per device, dtype and set of versions. Uses no tensor library.

During a self-test, a second file names the kernel under test. If the process crashes, that file stays. A kernel counts
as broken after two crashes in a row, because a user may have killed the process during the first test.
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
    """The verdicts on tested kernels, cached in a file. A key is "op: implementation"; an empty verdict is a pass."""

    file: Path
    device: str  # display name of the device
    verdicts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, device: str) -> SelfTestResults:
        """The results in the file. There are no verdicts if the file is missing or not readable."""
        try:
            verdicts = json.loads(file.read_text("utf-8"))["verdicts"]
            return cls(file, device, {str(key): str(reason) for key, reason in verdicts.items()})
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls(file, device)

    def write(self, fallbacks: Sequence[str] = ()) -> None:
        """Write the file atomically. If the folder is not writable, the next start tests again."""
        date = datetime.now(UTC).date().isoformat()
        contents = {"device": self.device, "date": date, "fallbacks": list(fallbacks), "verdicts": self.verdicts}
        temporary = self.file.with_suffix(".new")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(contents, indent=1), "utf-8")
            temporary.replace(self.file)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


class CrashMark:
    """A file with the name of the kernel under test. It is written before each test and deleted after the last test, so
    it exists after a crash. If another process has locked the file, this process writes no name.

    `crashed` is the kernel in whose test the last process crashed, or empty. `crashed_twice` says whether the last two
    processes crashed in the test of this kernel.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock: int | None = None  # a file descriptor; the system releases the lock when the process ends
        self.crashed = ""
        self.crashed_twice = False

    def __enter__(self) -> Self:
        with suppress(OSError):
            descriptor = os.open(self._file, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                text = os.pread(descriptor, 1000, 0).decode("utf-8", "replace")
                self.crashed, _, second_line = text.partition("\n")
                self.crashed_twice = bool(second_line)
            finally:
                os.close(descriptor)
        return self

    def write(self, title: str) -> None:
        """Write the name of the kernel under test; do nothing if the folder is not writable."""
        text = f"{title}\nagain" if title == self.crashed else title
        with suppress(OSError):
            if self._lock is None:
                self._lock = self._locked()
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, text.encode(), 0)
            os.fsync(self._lock)

    def _locked(self) -> int:
        """The descriptor of the file, created and locked. Raises OSError if another process has locked it."""
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
        """Delete the file, also after an exception: only a crash may leave the file."""
        if self._lock is None and not self.crashed:
            return
        with suppress(OSError):
            if self._lock is not None:
                os.ftruncate(self._lock, 0)  # another process may have opened the file before it is deleted
            self._file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)


def newest(folder: Path) -> dict[str, str]:
    """The outcome of each device's last self-test, by the name of the device. For `localllm doctor`."""
    outcomes: list[tuple[float, str, str]] = []
    for file in folder.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # the file is corrupt or was deleted
            contents = json.loads(file.read_text("utf-8"))
            outcome = "; ".join(contents["fallbacks"]) or f"all {len(contents['verdicts'])} kernels are right"
            outcomes.append((file.stat().st_mtime, str(contents["device"]), f"{outcome} ({contents['date']})"))
    return {device: outcome for _, device, outcome in sorted(outcomes)}
