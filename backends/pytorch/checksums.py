"""CRC-32 checksums of a packed file: one of its header, and one of each block of its data."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

BLOCK = 2**24  # bytes of data


def count(size: int) -> int:
    """Number of checksums of a file with `size` bytes of data, including the checksum of the header."""
    return 1 + -(-size // BLOCK)


class Checksums:
    """Computes the checksums of a file while it is written: first the header, then the data in chunks of any size."""

    def __init__(self, header: bytes) -> None:
        self.values = [zlib.crc32(header)]
        self._missing = 0  # bytes until the last block is full

    def add(self, data: memoryview) -> None:
        """Append `data` to the checksummed data."""
        while len(data):
            if self._missing == 0:
                self.values.append(0)
                self._missing = BLOCK
            chunk = data[: self._missing]
            data = data[self._missing :]
            self.values[-1] = zlib.crc32(chunk, self.values[-1])
            self._missing -= len(chunk)


def read_checked(file: int, start: int, into: memoryview, expected: Sequence[int], threads: int) -> bool:
    """Fill `into` from the file descriptor `file`, starting at byte `start` of the file, on several threads.

    Returns False if the file is too short or a block differs from its checksum. `expected` has the checksums of all
    blocks, without that of the header.
    """

    def matches(index: int) -> bool:
        block = into[index * BLOCK : (index + 1) * BLOCK]
        is_full = _fill(block, file, start + index * BLOCK)
        return is_full and zlib.crc32(block) == expected[index]

    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(matches, range(-(-len(into) // BLOCK))))


def _fill(block: memoryview, file: int, offset: int) -> bool:
    """Fill the block from the file, starting at byte `offset`. Returns False if the file ends too early."""
    while len(block):
        count_read = os.preadv(file, [block], offset)
        if count_read == 0:
            return False
        offset += count_read
        block = block[count_read:]
    return True
