"""Checksums of packed files: CRC-32 of the header and of each block of data, computed and checked block by block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

BLOCK = 2**24  # bytes of data


def count(size: int) -> int:
    """Number of checksums of `size` bytes of data, including that of the header."""
    return 1 + -(-size // BLOCK)


class Checksums:
    """Computes the checksums of a file while it is written: first the header, then the data in pieces of any size."""

    def __init__(self, header: bytes) -> None:
        self.values = [zlib.crc32(header)]
        self._left = 0  # bytes missing in the last block

    def add(self, data: memoryview) -> None:
        while len(data):
            if not self._left:
                self.values.append(0)
                self._left = BLOCK
            piece = data[: self._left]
            data = data[self._left :]
            self.values[-1] = zlib.crc32(piece, self.values[-1])
            self._left -= len(piece)


def read_checked(file: int, start: int, into: memoryview, expected: Sequence[int], threads: int) -> bool:
    """Read the file descriptor `file` from byte `start` into `into`, on several threads.

    Returns False if the file is too short or a block differs from its checksum in `expected` (without the header's).
    """

    def right(block: int) -> bool:
        part = into[block * BLOCK : (block + 1) * BLOCK]
        filled = 0
        while filled < len(part) and (count_read := os.preadv(file, [part[filled:]], start + block * BLOCK + filled)):
            filled += count_read
        return filled == len(part) and zlib.crc32(part) == expected[block]

    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(right, range(-(-len(into) // BLOCK))))
