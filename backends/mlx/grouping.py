"""Which residents lie together in a group, and when groups are joined, parted and given up.

Rows that are computed together every step cost least where they lie together, as far as their lengths are alike. To
join or part them copies their caches: only those that have come to stay are joined.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass

import mlx.core as mx

from .caches import Group
from .holders import Resident

PATIENCE = 8  # steps that a group waits for its rows: those with a grammar come every second step


@dataclass(slots=True, eq=False)
class Placed:
    """A group and who lies in its rows."""

    group: Group
    residents: list[Resident]
    steps: int = 1  # in a row that it was part of
    absent: int = 0  # in a row that it was not

    @property
    def cost(self) -> int:
        """Columns that attention reads."""
        return self.group.end * len(self.residents)


class Groups:
    """All groups, and who lies in them. It moves caches, and knows nothing of pages."""

    def __init__(self, room: int, group_columns: int | None) -> None:
        """`room`: columns of all groups. A group more is worth `group_columns` columns less to read; None: there is one
        group, whatever it costs."""
        self.room, self._group_columns = room, group_columns
        self._placed: list[Placed] = []

    def __iter__(self) -> Iterator[Placed]:
        return iter(self._placed)

    @property
    def residents(self) -> list[Resident]:
        return [resident for placed in self._placed for resident in placed.residents]

    @property
    def columns(self) -> int:
        """Of all rows, used or not."""
        return sum(placed.group.columns * len(placed.residents) for placed in self._placed)

    @property
    def waiting(self) -> list[Resident]:
        """Rows of groups that are not part of the step."""
        return [resident for placed in self._placed if placed.absent for resident in placed.residents]

    def unchanging(self, groups: int) -> bool:
        """There are these only: none waits for its rows, or is yet to be joined."""
        return len(self._placed) == groups and not any(placed.steps < 2 for placed in self._placed)

    def waiting_with(self, leaving: Set[Resident]) -> set[Resident]:
        """`leaving`, and who waits in a group with one of them: groups of ended requests go at once, not row by row."""
        found = set(leaving)
        for placed in self._placed:
            if placed.absent and not leaving.isdisjoint(placed.residents):
                found.update(placed.residents)
        return found

    def settle(self, present: Set[Resident]) -> tuple[list[Resident], list[Resident]]:
        """A step begins -> who is to leave: rows that leave a group others go on with give up their place, and may be
        back soon; a group that all left waits a little before it does: those rows have ended, most likely."""
        away, past = list[Resident](), list[Resident]()
        for placed in self._placed:
            absent = [resident for resident in placed.residents if resident not in present]
            if len(absent) < len(placed.residents):
                placed.steps, placed.absent = placed.steps + 1, 0
                away += absent
            else:
                placed.steps, placed.absent = 0, placed.absent + 1
                past += absent if placed.absent > PATIENCE else []
        return away, past

    def place(self, group: Group, residents: list[Resident]) -> None:
        """Into the rows of a new group; none of them lies with others."""
        self._placed = [placed for placed in self._placed if placed.residents[0] not in residents]
        for row, resident in enumerate(residents):
            resident.group, resident.row = group, row
        self._placed.append(Placed(group, residents))

    def remove(self, leaving: Collection[Resident]) -> None:
        """Those that lie with them stay."""
        for placed in [p for p in self._placed if any(resident in leaving for resident in p.residents)]:
            self._placed.remove(placed)
            staying = [resident for resident in placed.residents if resident not in leaving]
            if staying:
                self._regrouped([(placed, staying)])
        for resident in leaving:  # whoever still knows them: heirs write where they alone are
            resident.group.keys, resident.group.values = [], []

    def lose(self, residents: Collection[Resident]) -> None:
        """Their groups are of no use any more."""
        for resident in residents:
            self._placed = [placed for placed in self._placed if placed.group is not resident.group]
            resident.group, resident.row = Group([], [], 0, [0]), 0

    def part(self, resident: Resident) -> None:
        """From those that lie with it."""
        placed = next(p for p in self._placed if p.group is resident.group)
        others = [other for other in placed.residents if other is not resident]
        if others:
            self._placed.remove(placed)
            self._regrouped([(placed, others)])
            self._regrouped([(placed, [resident])])

    def joined(self, placed: list[Placed]) -> list[Placed]:
        """Groups that cost less together are joined, in their order, shortest first among those that are not; new ones
        only once they have come to stay."""
        if self._group_columns is None:
            columns = max(one.group.end for one in placed) * sum(len(one.residents) for one in placed)
            return [self._join(placed)] if len(placed) > 1 and columns <= self.room else placed
        new = [one for one in placed if one.steps < 2]
        old = sorted((one for one in placed if one.steps >= 2), key=lambda one: one.group.end)
        runs: list[list[Placed]] = []
        for one in old:
            if runs:
                rows, cost = sum(len(p.residents) for p in runs[-1]), sum(p.cost for p in runs[-1])
                wasted = one.group.end * rows - cost
                if wasted <= self._group_columns:
                    runs[-1].append(one)
                    continue
            runs.append([one])
        return [self._join(sorted(run, key=placed.index)) if len(run) > 1 else run[0] for run in runs] + new

    def _join(self, placed: list[Placed]) -> Placed:
        for one in placed:
            self._placed.remove(one)
        return self._regrouped([(one, one.residents) for one in placed])

    def _regrouped(self, sources: list[tuple[Placed, list[Resident]]]) -> Placed:
        """A new group of residents of others, which are given up."""
        residents = [resident for _, own in sources for resident in own]
        end = max(resident.length for resident in residents)
        parts = [placed.group.taken([resident.row for resident in own], end) for placed, own in sources]
        keys, values = (
            [mx.concatenate(list(each)) if len(each) > 1 else each[0] for each in zip(*side, strict=True)]
            for side in zip(*parts, strict=True)
        )
        group = Group(keys, values, end, [end - resident.length for resident in residents])
        for row, resident in enumerate(residents):
            resident.group, resident.row = group, row
        placed = Placed(group, residents, min(placed.steps for placed, _ in sources))
        self._placed.append(placed)
        return placed
