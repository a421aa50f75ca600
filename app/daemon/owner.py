"""Who is the daemon: one process of this user holds the lock on the pid file; pid and port say how to find it.

The lock, not the files' being there, is the truth: the kernel gives it up with the process, however that ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .. import paths
from ..errors import PortTaken, StorageFailed


class Owner:
    """This process is the daemon, until `release`. Raises PortTaken when another one is, or StorageFailed."""

    def __init__(self) -> None:
        self._pid_file = _pid_file()
        self._port_file = paths.port_file()
        try:
            self._lock = _take(self._pid_file)
        except BlockingIOError:
            pid = _number(self._pid_file)
            raise PortTaken(
                f"a localllm daemon is already running{f' (pid {pid})' if pid else ''}", hint="localllm stop stops it"
            ) from None
        except OSError as error:
            raise StorageFailed(f"{self._pid_file}: {error.strerror}") from None
        os.ftruncate(self._lock, 0)

    def publish(self, port: int) -> None:
        """Say where it listens; call once it does."""
        self._port_file.write_text(f"{port}\n")
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the files and let another process be the daemon."""
        for file in (self._port_file, self._pid_file):
            file.unlink(missing_ok=True)
        os.close(self._lock)


def owner_pid() -> int | None:
    """The running daemon's pid; 0 while it starts; None when there is none, whatever files say.

    Raises StorageFailed when the runtime folder is not ours alone.
    """
    file = _pid_file()
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with _closing(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _number(file)
        return None


def _pid_file() -> Path:
    try:
        return paths.pid_file()
    except OSError as error:
        raise StorageFailed(str(error), hint="to use another folder, set LOCALLLM_RUNTIME_DIR") from None


def _take(file: Path) -> int:
    """Open and lock the file that stands at this path. Raises BlockingIOError when it is locked."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor)
            # The owner before may have removed the file between our open and our lock.
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Raises BlockingIOError when a daemon has the lock; whoever only asks has it for a moment."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            return


def _number(file: Path) -> int:
    try:
        return int(file.read_text() or 0)
    except (OSError, ValueError):
        return 0


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
