"""Which bytes of a file are requested next. Integers only: no file, no network.

    chunks    0  1  2  3  4  5  6  7  8
              ■  ■  ▸──────┘  ▸────┘  ·     ■ complete   ▸──┘ lease: one request   · free

A lease takes the first free chunks, so that the file grows from its start and can be hashed as it grows. When no chunk
is free, a new lease takes the second half of the longest lease.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """The chunks that one connection downloads: `next` up to `end` (exclusive). Another lease may lower `end`."""

    next: int
    end: int
    offset: int = 0  # bytes of the chunk `next` that have arrived
    crc: int = 0  # of these bytes

    def restart_chunk(self) -> None:
        self.offset = 0
        self.crc = 0


class Chunks:
    """The chunks of one file: complete, leased or free."""

    def __init__(self, size: int, chunk_bytes: int, max_chunks: int) -> None:
        self.size = size
        self.chunk_bytes = chunk_bytes
        self.count = -(-size // chunk_bytes)
        self.complete = bytearray(self.count)
        self.single = False  # one lease at a time, for a server without ranges
        self._max_chunks = max_chunks
        self._leases: list[Lease] = []

    def take(self, shares: int = 1) -> Lease | None:
        """A new lease; None if every chunk is complete or leased, and no lease is long enough to split.

        The lease has at most one of `shares` parts of the free chunks, so that the last leases of a file are short.
        """
        if self.single and self._leases:
            return None
        lease = self._take_free(shares) or (None if self.single else self._split())
        if lease is not None:
            self._leases.append(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        """End a lease. Its incomplete chunks become free."""
        self._leases.remove(lease)

    def finish(self, lease: Lease) -> int:
        """The chunk `next` of a lease is complete; the lease continues with the chunk behind it. Returns its index."""
        index = lease.next
        self.complete[index] = 1
        lease.next += 1
        lease.restart_chunk()
        return index

    def invalidate(self, index: int) -> None:
        """A complete chunk was wrong: it becomes free."""
        self.complete[index] = 0

    def reset(self) -> None:
        """No chunk is complete. There must be no lease."""
        assert not self._leases, "a lease writes to the file"
        self.complete = bytearray(self.count)

    @property
    def leased(self) -> bool:
        return bool(self._leases)

    def length(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(self.chunk_bytes, self.size - index * self.chunk_bytes)

    def _take_free(self, shares: int) -> Lease | None:
        leased = sorted((lease.next, lease.end) for lease in self._leases)
        index = 0
        for start, end in [*leased, (self.count, self.count)]:
            index = self._skip_complete(index, start)
            if index < start:
                return Lease(index, self._end_of_free(index, start, shares))
            index = max(index, end)
        return None

    def _skip_complete(self, index: int, limit: int) -> int:
        free = self.complete.find(0, index, limit)
        return limit if free < 0 else free

    def _end_of_free(self, index: int, limit: int, shares: int) -> int:
        if not self.single:
            free = self.complete.count(0) - sum(lease.end - lease.next for lease in self._leases)
            limit = min(limit, index + self._max_chunks, index + max(1, free // shares))
        complete = self.complete.find(1, index, limit)
        return limit if complete < 0 else complete

    def _split(self) -> Lease | None:
        longest = max(self._leases, key=lambda lease: lease.end - lease.next, default=None)
        if longest is None or longest.end - longest.next < 2:
            return None
        middle = (longest.next + longest.end + 1) // 2
        lease = Lease(middle, longest.end)
        longest.end = middle
        return lease
