"""The pool of KV pages: the free page ids."""

from __future__ import annotations


class PagePool:
    """Hands out page ids 1…num_pages, the most recently returned first. Page 0 is for padding, never handed out."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages, 0, -1))

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """A free page. Raises IndexError when there is none."""
        return self._free.pop()

    def give_back(self, page: int) -> None:
        self._free.append(page)

    def free(self) -> list[int]:
        """The ids of all free pages, for checks."""
        return list(self._free)
