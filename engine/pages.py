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
    """Copies to do before the next step, of pages or of states. All targets differ."""

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}  # target -> source

    def add(self, source: int, target: int) -> None:
        """Copy `source` as it is before the step: all sources are read before any target is written."""
        self._sources[target] = source

    def source(self, target: int) -> int:
        """The source of the pending copy to `target`; without one, `target` itself."""
        return self._sources.get(target, target)

    def cancel(self, target: int) -> None:
        """Forget the copy to `target`, if any."""
        self._sources.pop(target, None)

    def drain(self) -> list[tuple[int, int]]:
        """(source, target) of all copies. None is pending afterwards."""
        pairs = [(source, target) for target, source in self._sources.items()]
        self._sources.clear()
        return pairs
