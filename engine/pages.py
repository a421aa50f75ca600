"""The free KV pages of one cache group, and copies of pages or states that wait for the next step."""

from __future__ import annotations


class PagePool:
    """Hands out page ids 1…num_pages, the most recently released first. Page 0 is for padding, never handed out."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages, 0, -1))

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self) -> int:
        """A free page. Raises IndexError if no page is free."""
        return self._free.pop()

    def release(self, page: int) -> None:
        self._free.append(page)

    def free(self) -> list[int]:
        """The ids of all free pages, for checks."""
        return list(self._free)


class PendingCopies:
    """The copies of pages (or of states) that must be made before the next step. All targets differ."""

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}  # target -> source

    def add(self, source: int, target: int) -> None:
        """Plan a copy of `source` to `target`. All sources are read before any target is written."""
        self._sources[target] = source

    def source(self, target: int) -> int:
        """The source of the pending copy to `target`; `target` itself if there is no such copy."""
        return self._sources.get(target, target)

    def cancel(self, target: int) -> None:
        """Forget the pending copy to `target`, if there is one."""
        self._sources.pop(target, None)

    def drain(self) -> list[tuple[int, int]]:
        """Return all pending copies as (source, target), and forget them."""
        pairs = [(source, target) for target, source in self._sources.items()]
        self._sources.clear()
        return pairs
