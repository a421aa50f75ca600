"""The free KV pages of one cache group, and copies of pages or states that wait for the next step."""

from __future__ import annotations


class PagePool:
    """Hands out page ids 1…num_pages, the most recently released first. Page 0 is for padding, never handed out."""

    def __init__(self, num_pages: int, *, records_freed: bool = False) -> None:
        """`records_freed`: whether `take_freed` lists pages. Its first list has all pages, because the runner may have
        data in pages that an earlier pool handed out."""
        self._free = list(range(num_pages, 0, -1))
        self._records_freed = records_freed
        self._freed = [(page, 0) for page in self._free] if records_freed else []

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self) -> int:
        """A free page. Raises IndexError if no page is free."""
        return self._free.pop()

    def release(self, page: int, replacement: int = 0) -> None:
        """Free a page. `replacement`: the equal page that its owner uses from now on; 0: none."""
        self._free.append(page)
        if self._records_freed:
            self._freed.append((page, replacement))

    def keep(self, page: int) -> None:
        """Take back the record of a release: the page was allocated again, and its new owner reads its KV."""
        if self._records_freed:
            self._freed.remove((page, 0))

    def take_freed(self) -> list[tuple[int, int]]:
        """(page, replacement) of each `release` since the last call, in order."""
        freed = self._freed
        self._freed = []
        return freed

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
