"""The journal of one partial file: which chunks are complete.

    localllm 1 <key> <size> <chunk_bytes> <check>
    revision <branch, tag or commit> <check>
    <index> <crc of the chunk> <check>
    ...

Each line ends with a check (CRC-32 of the line), so that a torn or zeroed line is ignored. A line is appended when its
chunk is written. After a crash, each claimed chunk is read again and compared with its CRC before it counts. Therefore
a line that reached the disk before its chunk does no harm: the chunk is downloaded again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .disk import Disk

HEADER = "localllm 1"
MAX_BYTES = 64 * 2**20  # 4 MiB chunks of 8 TiB need less
SUFFIX = ".localllm.journal"
REVISION = "revision "


class Journal:
    """The open journal of one file. `claims` has the chunks of an earlier process: index → CRC-32."""

    def __init__(self, disk: Disk, path: Path, key: str, size: int, chunk_bytes: int, revision: str) -> None:
        self._disk = disk
        self._path = path
        self._revision = revision
        self._header = f"{HEADER} {key} {size} {chunk_bytes}"
        self._descriptor = disk.open(path, append=True)
        try:
            self.claims = self._restore(size, chunk_bytes)
        except BaseException:
            disk.close(self._descriptor)
            raise

    def claim(self, index: int, crc: int) -> None:
        """Record that a chunk is complete."""
        self._disk.append(self._descriptor, _line(f"{index} {crc:08x}"))

    def clear(self) -> None:
        """Forget all chunks."""
        self._disk.resize(self._descriptor, 0)
        self._disk.append(self._descriptor, _line(self._header) + _line(REVISION + self._revision))
        self.claims = {}

    def sync(self) -> None:
        self._disk.sync(self._descriptor)

    def close(self) -> None:
        self._disk.close(self._descriptor)

    def remove(self) -> None:
        self._disk.remove(self._path)

    def _restore(self, size: int, chunk_bytes: int) -> dict[int, int]:
        """The claims of a journal for this file; another journal is replaced by an empty one."""
        text = self._disk.read_at(self._descriptor, MAX_BYTES, 0)
        lines = list(_payloads(text))
        if not lines or lines[0] != self._header:
            self.clear()
            return {}
        if not text.endswith(b"\n"):
            self._disk.append(self._descriptor, b"\n")  # the next line must not continue a torn line
        self._disk.append(self._descriptor, _line(REVISION + self._revision))
        return _claims(lines[1:], -(-size // chunk_bytes))


@dataclass(frozen=True, slots=True)
class Record:
    """A journal, as it is on the disk."""

    key: str
    size: int  # bytes of the complete file
    received: int  # bytes
    revision: str  # for which the file was requested last; empty: unknown


def read_record(path: Path) -> Record:
    """Raises OSError or ValueError if the journal is unreadable."""
    with path.open("rb") as file:
        lines = list(_payloads(file.read(MAX_BYTES)))
    if not lines:
        raise ValueError(f"{path} is empty")
    *name, key, size_text, chunk_text = lines[0].split(" ")
    if " ".join(name) != HEADER:
        raise ValueError(f"{path} is not a journal")
    size, chunk_bytes = int(size_text), int(chunk_text)
    chunks = _claims(lines[1:], -(-size // chunk_bytes))
    received = sum(min(chunk_bytes, size - index * chunk_bytes) for index in chunks)
    revisions = [line.removeprefix(REVISION) for line in lines if line.startswith(REVISION)]
    return Record(key, size, received, "".join(revisions[-1:]))


def _line(payload: str) -> bytes:
    data = payload.encode("utf-8", "replace")
    return b"%b %08x\n" % (data, zlib.crc32(data))


def _payloads(text: bytes) -> Iterator[str]:
    """The undamaged lines of the journal, without their checks."""
    for line in text.split(b"\n"):
        payload, _, check = line.rpartition(b" ")
        if payload and check == b"%08x" % zlib.crc32(payload):
            yield payload.decode("utf-8", "replace")


def _claims(lines: list[str], count: int) -> dict[int, int]:
    """Index → CRC of the chunks in the lines. The last line of a chunk counts."""
    claims = {}
    for line in lines:
        index, _, crc = line.partition(" ")
        if index.isdigit() and int(index) < count:
            claims[int(index)] = int(crc, 16)
    return claims
