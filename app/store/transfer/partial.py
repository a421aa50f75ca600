"""One large file while it arrives: its data, its journal and the hash of its prefix.

    blobs/<key>.localllm.incomplete    the data, with holes
    blobs/<key>.localllm.journal       the complete chunks
    blobs/<key>                        the file, when it is complete and verified

The order of the writes:
    1. a chunk is written to the data file;
    2. its CRC is appended to the journal: after a SIGKILL, which loses no write, the chunk counts;
    3. every few seconds the data is synced, then the journal: after a power cut, these chunks count;
    4. the hash of the complete file is compared with the hub's;
    5. the data is synced and renamed to its final name; then the journal is deleted.
A chunk of an earlier process counts when its data has the CRC of the journal, whatever reached the disk in which order.
huggingface_hub ignores both files, and deletes them with the repository.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from ..local.blobs import UNVERIFIED
from ..remote import RemoteFile
from .chunks import Chunks, Lease
from .disk import CAN_SYNC_ALL, Disk
from .journal import SUFFIX as JOURNAL_SUFFIX
from .journal import Journal
from .policy import Policy

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

DATA_SUFFIX = ".localllm.incomplete"
MAX_SINGLE_SYNCS = 16
MIN_CHUNKS = 16  # per connection
MIN_CHUNK_BYTES = 2**18


class Hash(Protocol):
    """The part of a hashlib object that a file needs."""

    def update(self, data: Buffer, /) -> None: ...
    def hexdigest(self) -> str: ...
    def copy(self) -> Self: ...


def new_hash(file: RemoteFile) -> Hash:
    """The hash that the hub names for a file; SHA-256 for a file without a hash."""
    if file.sha256 is None and file.git_oid is not None:
        return hashlib.sha1(b"blob %d\0" % file.size)
    return hashlib.sha256()


def matches(file: RemoteFile, digest: str) -> bool:
    """True if the digest is the file's hash, or the hub names none."""
    expected = file.sha256 or file.git_oid
    return expected is None or expected == digest


def blob_name(file: RemoteFile, digest: str) -> str:
    """The name of a complete blob: the hub's hash; of a file without one, a mark and the SHA-256 of the data."""
    return file.sha256 or file.git_oid or UNVERIFIED + digest


class PartialFile:
    """A file with chunks. Workers call `write`, one thread `sync`, and one hasher at a time the rest."""

    def __init__(self, disk: Disk, blobs: Path, file: RemoteFile, policy: Policy, revision: str = "") -> None:
        self.file = file
        chunk_bytes = _chunk_bytes(file.size, policy)
        self.chunks = Chunks(file.size, chunk_bytes, _chunks_of_request(file.size, chunk_bytes, policy))
        self._disk = disk
        self._blobs = blobs
        self._path = blobs / (file.key + DATA_SUFFIX)
        journal = blobs / (file.key + JOURNAL_SUFFIX)
        self._journal = Journal(disk, journal, file.key, file.size, chunk_bytes, revision)
        try:
            self._descriptor = disk.open(self._path)
        except BaseException:
            self._journal.close()
            raise
        self._hash = new_hash(file)
        self._hashed = 0
        self._unverified = dict(self._journal.claims)
        for index in self._unverified:
            self.chunks.complete[index] = 1

    @property
    def restored(self) -> int:
        """Bytes that an earlier process claims."""
        return sum(map(self.chunks.length, self._unverified))

    def prepare(self) -> None:
        """Set the length of the data file."""
        self._disk.resize(self._descriptor, self.file.size)

    def write(self, lease: Lease, block: bytes | memoryview) -> int | None:
        """Write a block, which must not exceed the rest of the current chunk. Returns the index of a completed chunk.

        The caller then calls `chunks.finish` with its lock.
        """
        index = lease.next
        self._disk.write_at(self._descriptor, block, index * self.chunks.chunk_bytes + lease.offset)
        lease.crc = zlib.crc32(block, lease.crc)
        lease.offset += len(block)
        if lease.offset < self.chunks.length(index):
            return None
        self._journal.claim(index, lease.crc)
        return index

    @property
    def hashed(self) -> int:
        """Number of chunks in the hash."""
        return self._hashed

    @property
    def can_hash(self) -> bool:
        return self._hashed < self.chunks.count and bool(self.chunks.complete[self._hashed])

    @property
    def unhashed(self) -> int:
        """Bytes that this process received and the hasher can add at once."""
        if self._hashed in self._unverified:
            return 0
        end = self.chunks.complete.find(0, self._hashed)
        return ((self.chunks.count if end < 0 else end) - self._hashed) * self.chunks.chunk_bytes

    @property
    def is_hashed(self) -> bool:
        return self._hashed == self.chunks.count

    def hash_next(self, buffer: memoryview) -> bool:
        """Add the next chunk to the hash. Returns False if the chunk does not have the CRC of the journal.

        The chunk passes through `buffer` in blocks, which stay in the processor's cache.
        """
        index = self._hashed
        claim = self._unverified.pop(index, None)
        extended = self._hash.copy()
        offset = index * self.chunks.chunk_bytes
        end = offset + self.chunks.length(index)
        crc = 0
        while offset < end:
            count = self._disk.read_into(self._descriptor, buffer[: end - offset], offset)
            if not count:
                return False
            extended.update(buffer[:count])
            if claim is not None:
                crc = zlib.crc32(buffer[:count], crc)
            offset += count
        if claim is not None and claim != crc:
            return False
        self._hash = extended
        self._hashed += 1
        return True

    def publish(self) -> str | None:
        """Move the complete file to its final name. Returns the name of the blob; None if the hash is wrong."""
        digest = self._hash.hexdigest()
        if not matches(self.file, digest):
            return None
        name = blob_name(self.file, digest)
        self._disk.sync(self._descriptor)
        self._disk.rename(self._path, self._blobs / name)
        self._journal.remove()
        return name

    def sync(self) -> None:
        """Write the received data, then the journal, to the disk."""
        self._disk.sync(self._descriptor)
        self._journal.sync()

    def reset(self) -> None:
        """Forget all data. There must be no lease."""
        self._journal.clear()
        self.chunks.reset()
        self._unverified.clear()
        self._hash = new_hash(self.file)
        self._hashed = 0

    def remove(self) -> None:
        """Delete the data, then the journal."""
        self._disk.remove(self._path)
        self._journal.remove()

    def close(self) -> None:
        self._disk.close(self._descriptor)
        self._journal.close()


def _chunk_bytes(size: int, policy: Policy) -> int:
    """The size of a chunk: small files have small ones, because an interruption loses a chunk of each connection."""
    chunk_bytes = policy.chunk_bytes
    while chunk_bytes > MIN_CHUNK_BYTES and chunk_bytes * policy.connections * MIN_CHUNKS > size:
        chunk_bytes //= 2
    return chunk_bytes


def _chunks_of_request(size: int, chunk_bytes: int, policy: Policy) -> int:
    """The limit of one request in chunks: every connection gets a share of the file."""
    share = -(-size // (chunk_bytes * policy.connections))
    return max(1, min(share, policy.request_bytes // chunk_bytes))


def remove_leftovers(disk: Disk, blobs: Path, file: RemoteFile) -> None:
    """Delete the data and the journal of a complete file: its process died before it deleted them."""
    for suffix in (DATA_SUFFIX, JOURNAL_SUFFIX):
        leftover = blobs / (file.key + suffix)
        if leftover.exists():
            disk.remove(leftover)


def store_small(disk: Disk, blobs: Path, file: RemoteFile, content: bytes) -> str | None:
    """Write a file that arrived in one piece. Returns the name of its blob; None if the hash is wrong.

    `publish_small` then syncs it and gives it this name.
    """
    hashed = new_hash(file)
    hashed.update(content)
    digest = hashed.hexdigest()
    if not matches(file, digest):
        return None
    descriptor = disk.open(blobs / (file.key + DATA_SUFFIX))
    try:
        disk.resize(descriptor, len(content))
        disk.write_at(descriptor, content, 0)
    finally:
        disk.close(descriptor)
    return blob_name(file, digest)


def publish_small(disk: Disk, blobs: Path, names: Sequence[tuple[RemoteFile, str]]) -> None:
    """Sync small files, then move them to their final names. `names`: each file, and the name of its blob.

    One sync of the file system is faster than many of single files, but also waits for other programs.
    """
    if CAN_SYNC_ALL and len(names) > MAX_SINGLE_SYNCS:
        disk.sync_all(blobs)
    else:
        for file, _ in names:
            descriptor = disk.open(blobs / (file.key + DATA_SUFFIX))
            try:
                disk.sync(descriptor)
            finally:
                disk.close(descriptor)
    for file, name in names:
        disk.rename(blobs / (file.key + DATA_SUFFIX), blobs / name)
