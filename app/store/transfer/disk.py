"""Every write of a transfer to the disk. Tests replace this class to make single calls fail."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
CAN_SYNC_ALL = hasattr(_libc, "syncfs")


class Disk:
    """File operations, each of which may raise OSError."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, file: Path, *, append: bool = False) -> int:
        """Open a file for reading and writing; create it if it is missing. Returns a file descriptor."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        return os.open(file, flags | (os.O_APPEND if append else 0), 0o644)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """Write all bytes at a position of the file."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[count:], offset + count

    def append(self, descriptor: int, data: bytes) -> None:
        """Append all bytes to a file that was opened for appending."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def read_at(self, descriptor: int, length: int, offset: int) -> bytes:
        """Read up to `length` bytes; fewer only at the end of the file."""
        blocks = []
        while length:
            block = os.pread(descriptor, length, offset)
            if not block:
                break
            blocks.append(block)
            length, offset = length - len(block), offset + len(block)
        return b"".join(blocks) if len(blocks) != 1 else blocks[0]

    def read_into(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Read up to the length of a buffer. Returns the number of bytes; 0 at the end of the file."""
        return os.preadv(descriptor, [buffer], offset)

    def resize(self, descriptor: int, length: int) -> None:
        """Set the length of a file. New bytes are zero and take no space."""
        os.ftruncate(descriptor, length)

    def sync(self, descriptor: int) -> None:
        """Return when the content of the file is on the disk."""
        _sync_data(descriptor)

    def sync_all(self, folder: Path) -> None:
        """Return when every file of the file system of `folder` is on the disk. Needs `CAN_SYNC_ALL`."""
        assert _libc is not None
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if _libc.syncfs(descriptor):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(folder))
        finally:
            os.close(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a folder; replace the target file. The change is atomic."""
        source.replace(target)

    def link(self, text: str, link: Path) -> None:
        """Create a symbolic link."""
        link.symlink_to(text)

    def remove(self, file: Path) -> None:
        """Delete a file if it exists."""
        file.unlink(missing_ok=True)
