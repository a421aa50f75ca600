"""Checksums of a file of ours: CRC-32 of its header and of each block of its data, found and checked block by block."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

BLOCK = 2**24  # bytes of data


def count(size: int) -> int:
    """How many checksums `size` bytes of data have, with that of the header."""
    return 1 + -(-size // BLOCK)


class Checksums:
    """Of a file that is being written: of its header, and then of its data in any pieces."""

    def __init__(self, header: bytes) -> None:
        self.values = [zlib.crc32(header)]
        self._left = 0  # bytes that the last block still takes

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
    """Fill `into` from a descriptor's byte `start` on, by several threads; whether all was there and as `expected`."""

    def right(block: int) -> bool:
        part = into[block * BLOCK : (block + 1) * BLOCK]
        done = 0
        while done < len(part) and (found := os.preadv(file, [part[done:]], start + block * BLOCK + done)):
            done += found
        return done == len(part) and zlib.crc32(part) == expected[block]

    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(right, range(-(-len(into) // BLOCK))))
