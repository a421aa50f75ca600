"""Disks for tests: one fails at a chosen call, the other loses unsynced data when the power is cut."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localllm.app.store.transfer.disk import Disk

FILE_CALLS = "open close write_at append read_at read_into resize sync".split()
CALLS = [*FILE_CALLS, *"make_folder sync_all sync_folder rename link remove".split()]


class CountingDisk(Disk):
    """Counts the calls of all threads. `before` is called with the number of the call, and may raise OSError."""

    def __init__(self, before: Callable[[int, str], None] = lambda number, name: None) -> None:
        self.count = 0
        self._lock = threading.RLock()
        for name in CALLS:
            setattr(self, name, self._counted(name, getattr(self, name), before))

    def _counted(
        self, name: str, method: Callable[..., object], before: Callable[[int, str], None]
    ) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            with self._lock:
                number = self.count
                self.count += 1
                before(number, name)
                return method(*args, **options)

        return counted


def failing_disk(position: int, code: int) -> CountingDisk:
    """A disk whose call number `position` fails with an errno."""

    def before(number: int, name: str) -> None:
        if number == position:
            raise OSError(code, os.strerror(code), name)

    return CountingDisk(before)


@dataclass
class Undo:
    """The reversal of one change. `owner`: the inode of a change of data, the folder of a change of names."""

    owner: object
    action: Callable[[], None]
    of_name: bool


class PowerCutDisk(CountingDisk):
    """Fails from call number `position` on. `cut` then takes back changes that were not synced.

    Data that was not synced is lost or kept write by write, or half of a write; names are lost from the last one on.
    """

    def __init__(self, position: int, saved: Path) -> None:
        self._undos: list[Undo] = []
        self._saved = saved
        self._copies = 0
        self._descriptors: dict[int, int] = {}  # inode → descriptor of ours
        super().__init__(lambda number, name: self._fail(number, position))

    @staticmethod
    def _fail(number: int, position: int) -> None:
        if number >= position:
            raise OSError("no power")

    def cut(self, numbers: random.Random) -> None:
        """Bring the disk into a state that it may have after the power is cut."""
        names = [undo for undo in self._undos if undo.of_name]
        kept = set(map(id, names[: numbers.randrange(len(names) + 1)]))
        for undo in reversed(self._undos):
            lost = id(undo) not in kept if undo.of_name else numbers.random() < 0.6
            if lost:
                undo.action()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def open(self, file: Path, *, append: bool = False) -> int:
        created = not file.exists()
        descriptor = super().open(file, append=append)
        self._own(descriptor)
        if created:
            self._undos.append(Undo(file.parent, lambda: file.unlink(missing_ok=True), True))
        return descriptor

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        before = os.pread(descriptor, len(data), offset)
        length = os.fstat(descriptor).st_size
        super().write_at(descriptor, data, offset)
        inode, own = self._own(descriptor)
        half = len(before) // 2 if offset % 2 else 0

        def undo() -> None:
            os.pwrite(own, before[half:], offset + half)
            if os.fstat(own).st_size > length:
                os.ftruncate(own, length)

        self._undos.append(Undo(inode, undo, False))

    def append(self, descriptor: int, data: bytes) -> None:
        length = os.fstat(descriptor).st_size
        super().append(descriptor, data)
        inode, own = self._own(descriptor)

        def undo() -> None:
            """The length is on the disk, the data is not: zeros, as some file systems do."""
            if os.fstat(own).st_size >= length + len(data):
                os.pwrite(own, bytes(len(data)), length)

        self._undos.append(Undo(inode, undo, False))

    def resize(self, descriptor: int, length: int) -> None:
        before = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        super().resize(descriptor, length)
        inode, own = self._own(descriptor)

        def undo() -> None:
            os.ftruncate(own, len(before))
            os.pwrite(own, before, 0)

        self._undos.append(Undo(inode, undo, False))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        inode = os.fstat(descriptor).st_ino
        self._undos = [undo for undo in self._undos if undo.owner != inode]

    def sync_all(self, folder: Path) -> None:
        super().sync_all(folder)
        self._undos.clear()

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._undos = [undo for undo in self._undos if undo.owner != folder]

    def rename(self, source: Path, target: Path) -> None:
        copy = self._save(target)
        super().rename(source, target)

        def undo() -> None:
            if target.exists() or target.is_symlink():
                target.rename(source)
            if copy is not None:
                copy.rename(target)

        self._undos.append(Undo(target.parent, undo, True))

    def link(self, text: str, link: Path) -> None:
        super().link(text, link)
        self._undos.append(Undo(link.parent, lambda: link.unlink(missing_ok=True), True))

    def remove(self, file: Path) -> None:
        copy = self._save(file)
        super().remove(file)
        if copy is not None:
            saved = copy
            self._undos.append(Undo(file.parent, lambda: saved.rename(file) and None, True))

    def _own(self, descriptor: int) -> tuple[int, int]:
        inode = os.fstat(descriptor).st_ino
        if inode not in self._descriptors:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self._descriptors[inode] = os.open(path, os.O_RDWR)
        return inode, self._descriptors[inode]

    def _save(self, file: Path) -> Path | None:
        """Another name of the same file, so that its removal can be taken back."""
        if not file.is_file() or file.is_symlink():
            return None
        self._copies += 1
        copy = self._saved / str(self._copies)
        copy.hardlink_to(file)
        return copy
