"""Who holds which page, and what of it the pool does not have yet.

The engine speaks of pages only. A page's content is in the pool, or on its way there: the sequence that wrote it is
resident in a group, where attention reads it fastest, and its new positions are copied to the pool when it leaves or
when somebody else is about to read them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from ...engine.batch import Ints
from ...engine.errors import OutOfMemory
from .caches import Group
from .pool import Pool


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose cache lies in a row of a group."""

    group: Group
    row: int
    synced: int = 0  # positions that the pool has, too
    pages: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    lost: bool = False  # what the pool has not is nowhere: the step that computed on failed

    @property
    def length(self) -> int:
        return self.group.end - self.group.padding[self.row]


class Holders:
    """The residents that hold each page. It writes what they owe to the pool, and nothing else."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._by_page: dict[int, list[Resident]] = {}

    def having_just(self, head: Ints, positions: int) -> Iterable[Resident]:
        """Those with so many positions, in these pages."""
        for resident in self._of_last(head):
            if resident.length == positions and np.array_equal(resident.pages, head):
                yield resident

    def having(self, head: Ints, positions: int) -> Resident | None:
        """One with so many positions in these pages, and perhaps more."""
        for resident in self._of_last(head):
            if resident.length >= positions and np.array_equal(resident.pages[: len(head)], head):
                return resident
        return None

    def _of_last(self, head: Ints) -> list[Resident]:
        return self._by_page.get(int(head[-1]), [])

    def hold(self, resident: Resident, pages: Ints) -> None:
        """Those it holds, and more."""
        for page in pages[len(resident.pages) :].tolist():
            self._by_page.setdefault(page, []).append(resident)
        resident.pages = pages.copy()

    def release(
        self, leaving: Collection[Resident], gone: Collection[int] = (), unsure: Collection[Resident] = ()
    ) -> None:
        """They hold nothing any more: what nobody else has is written, but nothing to pages `gone`, whose content
        nobody asks for. `unsure`: who has it, but may lose it yet."""
        self._flush(leaving, {*leaving, *unsure}, gone)
        for resident in leaving:
            for page in set(resident.pages.tolist()):
                self._by_page[page].remove(resident)

    def sync(self, pages: Iterable[int]) -> None:
        """These pages are about to be read from the pool."""
        holders = {resident for page in pages for resident in self._by_page.get(page, ())}
        if any(resident.lost for resident in holders):
            raise OutOfMemory("a step without memory took what this one builds on")
        self._flush(holders)

    def past(self, pages: Collection[int], keep: Set[Resident], gone: Set[int]) -> set[Resident]:
        """Who is to leave, but for `keep`, as these pages are about to hold something else (`gone`: and nobody reads
        them before): whoever has them is a sequence of the past."""
        past = {r for page in pages for r in self._by_page.get(page, ()) if r not in keep}
        return {resident for resident in past if not self._shortened(resident, set(pages), gone, past)}

    def _shortened(self, resident: Resident, changed: Set[int], gone: Set[int], past: Set[Resident]) -> bool:
        """One that lies alone stays without its last pages, where the others are still to be written: that can wait."""
        start, end = self._owed(resident, past, gone)
        used = -(-end // self._pool.page_size)
        if start >= end or len(resident.group.padding) > 1 or not changed.isdisjoint(resident.pages[:used].tolist()):
            return False
        self._cut(resident, used, len(resident.pages))
        return True

    def lose(self, residents: Collection[Resident]) -> None:
        """The step that computed on with them failed: of what they hold only what others or the pool have is left."""
        for resident in residents:
            resident.lost = True
        for resident in residents:
            self._cut(resident, 0, self._others(resident, resident.synced) // self._pool.page_size)

    def _cut(self, resident: Resident, first: int, end: int) -> None:
        """It holds its pages first…end-1 no more."""
        for page in set(resident.pages[first:end].tolist()):
            self._by_page[page].remove(resident)
        resident.pages = np.delete(resident.pages, slice(first, end))

    def _others(self, resident: Resident, start: int, leaving: Collection[Resident] = ()) -> int:
        """From `start` on, up to which position there are others that have its pages, and stay."""
        size = self._pool.page_size
        while start < resident.length and (index := start // size) < len(resident.pages):
            reached = start
            for other in self._by_page[int(resident.pages[index])]:
                if other is not resident and not other.lost and other not in leaving:
                    end = min(_alike(resident, other, index) * size, other.length, resident.length)
                    reached = max(reached, end if end == resident.length else end // size * size)
            if reached == start:
                break
            start = reached
        return start

    def _owed(self, resident: Resident, leaving: Collection[Resident], gone: Collection[int]) -> tuple[int, int]:
        """What is to be written of it: see _flush. An heir's begun page is yet to come."""
        start, used = resident.synced, len(resident.pages)
        while used and resident.pages[used - 1] in gone:
            used -= 1
        if leaving:
            start = self._others(resident, start, leaving)
        return start, min(resident.length, used * self._pool.page_size)

    def _flush(
        self, residents: Iterable[Resident], leaving: Collection[Resident] = (), gone: Collection[int] = ()
    ) -> None:
        """Write what the pool has not; of those `leaving` only what no other will, and nothing to pages `gone`."""
        by_group = dict[int, list[Resident]]()
        for resident in residents:
            if resident.synced < resident.length:
                by_group.setdefault(id(resident.group), []).append(resident)
        for each in by_group.values():
            spans = list[tuple[Resident, int, int]]()
            for resident in each:
                start, end = self._owed(resident, leaving, gone)
                if start < end:
                    spans.append((resident, start, end))
            if spans:
                rows, pages = [r.row for r, _, _ in spans], [r.pages for r, _, _ in spans]
                starts, ends = [start for _, start, _ in spans], [end for *_, end in spans]
                self._pool.write(each[0].group, rows, pages, starts, ends)
            for resident, start, end in spans:
                if start == resident.synced:
                    self._written(resident, end)

    def _written(self, resident: Resident, end: int) -> None:
        """The pool has its positions 0…end-1: whoever else has its pages need not write them."""
        size, before = self._pool.page_size, resident.synced
        resident.synced = end
        new = resident.pages[before // size : -(-end // size)].tolist()
        for other in {other for page in new for other in self._by_page[page]}:
            same = size * _alike(resident, other)
            other.synced = max(other.synced, min(end, same, other.length))


def _alike(one: Resident, other: Resident, start: int = 0) -> int:
    """Up to which page both hold the same, from page `start` on."""
    most = min(len(one.pages), len(other.pages))
    differ = np.flatnonzero(one.pages[start:most] != other.pages[start:most])
    return start + int(differ[0]) if len(differ) else most
