"""Reads the headers of weight files, on the disk or at a hub, without their data.

A GGUF header is parsed in a child process with limits on time and memory: GGUF is a binary format in which every length
is a number of the file.
"""

from __future__ import annotations

import atexit
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from ....engine.errors import ModelRefused
from ....engine.files import gguf_values
from ....engine.files.gguf import GgufHeader
from ....engine.files.tensor_files import header_length, refusing_unreadable, regular_size
from ...bounded import BoundedChild, ChildLost
from ...paths import printable
from .headers_child import Answer, Job

FIRST_BYTES = 512 * 2**10  # bytes of the first read of a GGUF file
GROWTH = 4  # factor by which each further read increases the total of bytes
CPU_LIMIT = 5.0  # seconds of processor time for one header; the largest vocabularies take about 0.2 s
WALL_LIMIT = 20.0  # seconds of elapsed time for one header
MEMORY_LIMIT = 512 * 2**20  # bytes of address space of the child process


class Reader(Protocol):
    """A file with random access."""

    @property
    def name(self) -> str:
        """The name of the file, for error messages."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer at the end of the file. Raises ModelRefused or an AppError."""
        ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A Reader of a file on the disk."""

    path: Path
    size: int

    @classmethod
    def open(cls, path: Path) -> LocalFile:
        """Raises ModelRefused for a missing file, and for anything but a regular file."""
        return cls(path, regular_size(path))

    @property
    def name(self) -> str:
        return self.path.name

    def read(self, offset: int, length: int) -> bytes:
        with refusing_unreadable(self.path), self.path.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)


def safetensors_head(reader: Reader) -> bytes:
    """The header of a safetensors file with its length prefix. Raises ModelRefused if the length is impossible."""
    prefix = reader.read(0, 8)
    return prefix + reader.read(8, header_length(Path(reader.name), prefix, reader.size))


def read_gguf(reader: Reader) -> GgufHeader:
    """The validated header of a GGUF file. Raises ModelRefused."""
    head = b""
    needed = FIRST_BYTES
    while True:
        length = min(max(needed, GROWTH * len(head)), reader.size, gguf_values.MAX_HEADER)
        head += reader.read(len(head), length - len(head))
        if len(head) < length:
            raise ModelRefused(f"{reader.name} has {len(head)} bytes, not {reader.size}", "download it again")
        answer = _parse(Job(printable(reader.name), head, reader.size))
        if answer.header is not None:
            return answer.header
        if answer.problem:
            raise ModelRefused(answer.problem, answer.hint)
        needed = answer.needed


def read_gguf_file(path: Path) -> GgufHeader:
    """The validated header of a GGUF file on the disk; a file that stays the same is read once. Raises ModelRefused."""
    file = LocalFile.open(path)
    return _read_version(file, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _read_version(file: LocalFile, *version: int) -> GgufHeader:
    return read_gguf(file)


def _parse(job: Job) -> Answer:
    try:
        reply = _child().call(msgspec.msgpack.encode(job))
    except ChildLost as error:
        raise ModelRefused(f"{job.name} is not a valid GGUF file: cannot parse its header: {error}") from None
    return msgspec.msgpack.decode(reply, type=Answer)


@functools.cache
def _child() -> BoundedChild:
    """The child process of this process. It ends with this process."""
    child = BoundedChild(
        "localllm.app.store.checks.headers_child",
        cpu=CPU_LIMIT,
        wall=WALL_LIMIT,
        memory=MEMORY_LIMIT,
        hello=lambda: b"",
    )
    atexit.register(child.close)
    return child
