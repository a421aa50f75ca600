"""Computes the size of the cache: a group of pages for the layers that keep all positions, one for the layers with a
sliding window, which keep the positions that their window still reads, and recurrent states with their snapshots."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .memory_plan import NO_WINDOW, MemoryPlan, WindowPages
from .runner import CacheGroup

# If memory is short, the cache has room for the windows of at most as many rows as have this number of windows of
# positions each in the layers without a window: longer rows need more pages there, and not more windows.
ROW_WINDOWS = 4
STATE_SHARE = 0.5  # share of the cache that states and snapshots may have, if there are several rows
MAX_SNAPSHOTS = 64  # of recurrent states, if the maximum number of rows is not larger


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The number of pages in the layers that keep all positions, and the number of rows whose windows and states fit.
    If memory is short, these are fewer than the maximum rows, so that one sequence of the requested context fits."""

    pages: int
    rows: int
    max_pages: int  # as MemoryPlan.max_pages
    max_window_pages: int  # as MemoryPlan.max_window_pages
    snapshots: int  # of recurrent states


@dataclass(frozen=True, slots=True)
class CachePages:
    """The bytes of the pages of all layers. `page_bytes`: of a page in the layers that keep all positions."""

    page_size: int
    page_bytes: int
    window: WindowPages = NO_WINDOW
    state_bytes: int = 0  # of the recurrent states of a sequence in all layers

    @classmethod
    def of(
        cls, page_size: int, page_bytes: int, sliding_bytes: int, window: int, context: int, step_tokens: int
    ) -> CachePages:
        """`page_bytes`, `sliding_bytes`: bytes of a page in the layers without and with a window; `window`: positions
        that a row keeps there; `context`: maximum positions of a row; `step_tokens`: maximum tokens of a step."""
        if not sliding_bytes or window >= context:
            return cls(page_size, page_bytes + sliding_bytes)
        pages = WindowPages(
            page_bytes=sliding_bytes,
            row_pages=-(-window // page_size) + 2,  # the window begins and ends within a page
            step_pages=-(-step_tokens // page_size) + 2,
        )
        return cls(page_size, page_bytes, pages)

    def bytes(self, pages: int, rows: int) -> int:
        """Bytes of a cache with `pages` pages in the layers that keep all positions, and for each of `rows` rows a
        window, a state and a snapshot."""
        return pages * self.page_bytes + self.window.bytes(pages, rows) + 2 * rows * self.state_bytes

    def largest(self, limit: int, rows: int, wanted: int) -> int:
        """The largest number of pages, at most `wanted`, for which a cache with the windows of `rows` rows has at most
        `limit` bytes."""
        return bisect_right(range(1, wanted + 1), limit, key=lambda pages: self.bytes(pages, rows))

    def size(self, limit: int, context: int, rows: int, row_tokens: int | None) -> CacheSize:
        """The size of a cache of at most `limit` bytes for a context of `context` positions and `rows` rows.
        `row_tokens`: positions of each row; None: as many as fit."""
        context_pages = -(-context // self.page_size)
        most = limit // self.page_bytes if self.page_bytes else context_pages * rows
        wanted = most
        if row_tokens is not None:
            wanted = min(most, -(-max(context, rows * min(context, row_tokens)) // self.page_size))
        max_pages = self.largest(limit, 1, most)
        max_window_pages = 0
        if self.window.page_bytes:
            max_window_pages = (limit - max_pages * self.page_bytes) // self.window.page_bytes
        pages = self.largest(limit, rows, wanted)
        while rows > 1 and (
            pages < min(wanted, max(context_pages, ROW_WINDOWS * rows * self.window.row_pages))
            or 2 * rows * self.state_bytes > STATE_SHARE * limit
        ):
            rows //= 2
            pages = self.largest(limit, rows, wanted)
        return CacheSize(pages, rows, max_pages, max_window_pages, self._snapshots(limit, pages, rows))

    def _snapshots(self, limit: int, pages: int, rows: int) -> int:
        if not self.state_bytes:
            return 0
        others = max(0, limit - self.bytes(pages, rows)) // self.state_bytes
        return max(rows, min(rows + others, MAX_SNAPSHOTS))


def cache_groups(memory: MemoryPlan, window: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a runner. The layers with a window have a group of their own if it saves pages."""
    full = CacheGroup(memory.page_size, memory.num_pages)
    if memory.window_pages in (0, memory.num_pages):
        return (full,)
    return full, CacheGroup(memory.page_size, memory.window_pages, window)
