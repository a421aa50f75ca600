"""Ensures that a user has one daemon: the daemon locks its pid file, which has its pid. The port file has its port.

Only the lock shows that a daemon runs, because the files may outlive it. The kernel releases the lock when the process
ends, even if it crashes.
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
    """The lock of the daemon, from the constructor to `release`.

    The constructor raises PortTaken if another process has the lock, and StorageFailed if it cannot open the file.
    """

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
        """Write pid and port of the daemon to their files. Call this method when the daemon listens."""
        self._port_file.write_text(f"{port}\n")
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Remove the files and release the lock."""
        for file in (self._port_file, self._pid_file):
            file.unlink(missing_ok=True)
        os.close(self._lock)


def owner_pid() -> int | None:
    """The pid of the running daemon; 0 while the daemon starts; None if no daemon runs.

    Raises StorageFailed if other users can access the runtime folder.
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
    """Open and lock the file at this path; returns its descriptor. Raises BlockingIOError if it is locked."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor)
            # A daemon that ended may have removed the file between open and lock.
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the file. Raises BlockingIOError if a daemon has the lock.

    `owner_pid` in another process also locks the file for an instant to test it; this function waits for that.
    """
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
