"""Which sequences' caches lie in groups, and which pages of the pool hold them as well.

The engine speaks of pages only. A page's content is in the pool, or on its way there: the sequence that wrote it is
resident in a group, where attention reads it fastest, and its new positions are copied to the pool when it leaves or
when somebody else is about to read them (a prefix hit, a page copy). Who a row is, its pages tell: a row goes on with
a resident that has exactly its pages up to its first position; where two rows could, the second reads the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...engine.batch import Batch, Ints
from ...engine.errors import OutOfMemory
from . import caches
from .caches import STEP, Group, LayerShape
from .failures import shortages
from .pool import Pool

PATIENCE = 8  # steps that a group waits for its rows: those with a grammar come every second step


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose cache lies in a row of a group."""

    group: Group
    row: int
    pages: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    synced: int = 0  # positions that the pool has, too
    lost: bool = False  # what the pool has not is nowhere: the step that computed on failed

    @property
    def length(self) -> int:
        return self.group.end - self.group.padding[self.row]


@dataclass(slots=True, eq=False)
class Placed:
    """A group and who lies in its rows."""

    group: Group
    residents: list[Resident]
    steps: int = 0  # in a row that it was part of
    absent: int = 0  # in a row that it was not

    @property
    def cost(self) -> int:
        """Columns that attention reads."""
        return self.group.end * len(self.residents)


@dataclass(frozen=True, slots=True)
class Work:
    """One call of the model: batch rows in the order of the groups' rows."""

    rows: list[int]
    groups: list[Group]
    new: list[int]  # tokens of each group's rows
    filled: int = 1  # so many are computed of each row
    passing: bool = False  # its row finds no room among the groups: to be computed before the next call is asked for


@dataclass(slots=True)
class Steady:
    """The last step, whose rows all decoded: nearly every step does no more than go on with it."""

    work: Work
    residents: list[Resident]  # of the batch's rows
    positions: Ints
    table: Ints  # [rows, pages]; the engine hands the same array on where no page is new
    used: NDArray[np.bool_]  # [rows, pages]: those that the residents hold

    def has(self, table: Ints) -> bool:
        """Its pages that are in use begin `table`, too."""
        pages = self.table.shape[1]
        return table.shape[1] >= pages and bool(((table[:, :pages] == self.table) | ~self.used).all())


class Residents:
    """Finds or makes room for every row of a batch, and keeps the pool right."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, context: int, group_columns: int | None
    ) -> None:
        """A group more is worth `group_columns` columns less to read; None: there is one group, whatever it costs."""
        self._shapes, self._context, self._group_columns = shapes, context, group_columns
        self._room = num_pages * page_size  # columns of all groups
        self.pool = Pool(shapes, num_pages, page_size)
        self._placed: list[Placed] = []
        self._holders: dict[int, list[Resident]] = {}  # by page
        self._unasked: list[mx.array] = []
        self._begun: list[Resident] = []  # rows of the last step
        self._steady: Steady | None = None

    def begin(self, batch: Batch) -> Iterator[Work]:
        """The calls that compute a batch that does not go on with the last one, in order; inert rows (all on page 0)
        are in none of them.

        Pages hold what rows share once, groups for each row: rows that find no room in groups pass one by one.
        """
        self._begun, self._steady = [], None
        if len(batch.copies):
            self._forget(batch.copies[:, 1].tolist(), keep=set())
            self._sync(batch.copies[:, 0].tolist())
            self.pool.copy(batch.copies)
        starts = batch.positions[batch.row_starts[:-1]].tolist()
        counts = np.diff(batch.row_starts).tolist()
        real = [row for row in range(batch.num_rows) if batch.page_table.shape[1] and batch.page_table[row, 0]]
        found: dict[int, Resident | None] = {}
        present: set[Resident] = set()
        for row in real:
            found[row] = resident = self._find(batch.page_table[row], starts[row], present)
            present |= {resident} if resident is not None else set()
        self._settle(present)
        self._forget(self._new_pages(batch, found, starts, counts), keep=present)
        taken: dict[int, Resident] = {}
        passing: list[int] = []
        for row in real:
            end = starts[row] + counts[row]
            if found[row] is None and not self._has_room(end):
                passing.append(row)
            else:
                taken[row] = self._take_up(batch.page_table[row], starts[row], end, found[row])
        self._begun = list(taken.values())
        yield from self._prompts({row: r for row, r in taken.items() if counts[row] > 1}, starts, counts)
        yield from self._decoding({row: r for row, r in taken.items() if counts[row] == 1}, batch)
        for row in passing:
            yield from self._passing(batch.page_table[row], row, starts[row], counts[row])

    def _decoding(self, rows: dict[int, Resident], batch: Batch) -> Iterator[Work]:
        """Those with one token each, all in one call."""
        if not rows:
            return
        single = {id(resident): row for row, resident in rows.items()}
        decoding = [p for p in self._placed if id(p.residents[0]) in single]  # in the batch's order: see _Steady
        together = self._grouped(sorted(decoding, key=lambda p: single[id(p.residents[0])]))
        order = [single[id(resident)] for placed in together for resident in placed.residents]
        work = Work(order, [placed.group for placed in together], [1] * len(together))
        if len(rows) == batch.num_rows:
            self._keep(work, list(rows.values()), batch)
        yield work

    def _passing(self, table: Ints, row: int, start: int, count: int) -> Iterator[Work]:
        """One that is read from the pool, computed, and written back."""
        resident = self._take_up(table, start, start + count, None)
        self._begun.append(resident)
        yield Work([row], [resident.group], [count], self._filled(start, count), passing=True)
        self._drop([resident])
        self._begun.remove(resident)
        with shortages():
            mx.eval(self.take_changed())

    def _prompts(self, rows: dict[int, Resident], starts: list[int], counts: list[int]) -> Iterator[Work]:
        """Those that are filled up to the same number are computed in one call, and new ones of one length, whose
        attention is then one call, too, lie together from the beginning."""
        calls: dict[int, dict[tuple[int, int], list[int]]] = {}
        for row, resident in rows.items():
            alike = (counts[row], -1) if starts[row] == 0 else (counts[row], row)
            calls.setdefault(self._filled(starts[row], counts[row]), {}).setdefault(alike, []).append(row)
            self._apart(resident)
        for filled, groups in calls.items():
            for members in groups.values():
                if len(members) > 1:
                    self._begin_together([rows[row] for row in members], counts[members[0]])
            order = [row for members in groups.values() for row in members]
            new = [counts[members[0]] for members in groups.values()]
            yield Work(order, [rows[members[0]].group for members in groups.values()], new, filled)

    def _begin_together(self, residents: list[Resident], end: int) -> None:
        """None of them has positions yet."""
        group = Group.empty(self._shapes, end, len(residents))
        self._placed = [placed for placed in self._placed if placed.residents[0] not in residents]
        for row, resident in enumerate(residents):
            resident.group, resident.row = group, row
        self._placed.append(Placed(group, residents, steps=1))

    def _filled(self, start: int, new: int) -> int:
        """How many tokens are computed for so many of a row: a model need not know positions beyond its context."""
        filled = -(-new // caches.PREFILL) * caches.PREFILL if new > 1 else 1
        return filled if start + filled <= self._context else new

    def _new_pages(
        self, batch: Batch, found: dict[int, Resident | None], starts: list[int], counts: list[int]
    ) -> list[int]:
        """Those that hold something else after this step than before."""
        size, new = self.pool.page_size, list[int]()
        for row, resident in found.items():
            held = 0 if resident is None else len(resident.pages)
            new += batch.page_table[
                row, max(starts[row] // size, held) : -(-(starts[row] + counts[row]) // size)
            ].tolist()
        return new

    def _keep(self, work: Work, residents: list[Resident], batch: Batch) -> None:
        used = np.arange(batch.page_table.shape[1]) <= (batch.positions // self.pool.page_size)[:, None]
        self._steady = Steady(work, residents, batch.positions, batch.page_table, used)

    def goes_on(self, batch: Batch) -> Work | None:
        """The last step's call, where each row has one more token and all else is as it was: it computes this batch,
        too. Pages that are new are noted."""
        last, table = self._steady, batch.page_table
        if (
            last is None
            or len(batch.copies)
            or batch.num_tokens != batch.num_rows
            or len(self._placed) != len(last.work.groups)  # others wait for their rows, or are to be joined
            or any(placed.steps < 2 for placed in self._placed)
            or not np.array_equal(batch.positions, last.positions + 1)
            or (table is not last.table and not last.has(table))
        ):
            return None
        last.positions = batch.positions
        new = np.flatnonzero(batch.positions % self.pool.page_size == 0)
        for row in new.tolist():
            resident = last.residents[row]
            page = table[row, batch.positions[row] // self.pool.page_size]
            self._forget([int(page)], keep={resident})
            self._holders.setdefault(int(page), []).append(resident)
            resident.pages = np.append(resident.pages, page)
        if len(new):
            self._keep(last.work, last.residents, batch)
        return last.work

    def give_up(self) -> None:
        """The step begun last was not computed: what only its rows' caches held is lost, and their memory free."""
        self._lose(self._begun)
        self.ask_again()

    def give_up_all(self) -> None:
        """Of no step it is known what was computed: what only caches hold is lost."""
        self._lose([resident for placed in self._placed for resident in placed.residents])

    def _lose(self, residents: list[Resident]) -> None:
        for resident in residents:
            safe = resident.synced // self.pool.page_size
            for page in set(resident.pages[:safe].tolist()):
                self._holders[page].remove(resident)
            resident.pages = resident.pages[safe:]
            self._placed = [placed for placed in self._placed if placed.group is not resident.group]
            resident.group, resident.row, resident.lost = Group([], [], 0, [0]), 0, True
        self._begun, self._steady = [], None

    def ask_again(self) -> None:
        """What take_changed() named was not computed: what the pool had to hold before is still to be."""
        self.pool.changed = True

    def rest(self) -> None:
        """Nobody computes: groups give their memory up, and their rows are read from the pool when they come again."""
        self._drop([resident for placed in self._placed for resident in placed.residents])
        self._begun, self._steady = [], None

    def _has_room(self, end: int) -> bool:
        """For a row up to `end`; groups that wait for their rows give way."""
        needed = -(-(end + 1) // STEP) * STEP
        if self._columns() + needed > self._room:
            self._drop([resident for placed in self._placed if placed.absent for resident in placed.residents])
        return self._columns() + needed <= self._room

    def _columns(self) -> int:
        return sum(placed.group.keys[0].shape[2] * len(placed.residents) for placed in self._placed)

    def written(self, work: Work, *, computed: bool) -> None:
        """The model was called for `work`; where nothing asks for its answer its caches must be asked for."""
        if not computed:
            self._unasked += [x for group in work.groups for held in (group.keys, group.values) for x in held]

    def take_changed(self) -> list[mx.array]:
        """What was written and no answer depends on: left lazy, it would keep what it was made from."""
        changed, self._unasked = self._unasked, []
        if self.pool.changed:
            changed += [*self.pool.keys, *self.pool.values]
            self.pool.changed = False
        return changed

    def _find(self, table: Ints, start: int, taken: Set[Resident]) -> Resident | None:
        """Whose cache the row goes on with; `taken` by rows that begin with the same whole pages."""
        if start == 0:
            return None
        used = -(-start // self.pool.page_size)
        for resident in self._holders.get(int(table[used - 1]), ()):
            same = resident.length == start and np.array_equal(resident.pages, table[:used])
            if same and resident not in taken:
                return resident
        return None

    def _settle(self, present: Set[Resident]) -> None:
        """Rows that leave a group others go on with give up their place; a group that all left waits a little."""
        for placed in list(self._placed):
            staying = [resident for resident in placed.residents if resident in present]
            if not staying:
                placed.steps, placed.absent = 0, placed.absent + 1
                if placed.absent > PATIENCE:
                    self._drop(placed.residents)
                continue
            placed.steps, placed.absent = placed.steps + 1, 0
            if len(staying) < len(placed.residents):
                self._drop([resident for resident in placed.residents if resident not in present])

    def _drop(self, residents: Iterable[Resident]) -> None:
        leaving = {id(resident): resident for resident in residents}
        self._flush(leaving.values())
        for resident in leaving.values():
            for page in set(resident.pages.tolist()):
                self._holders[page].remove(resident)
        for placed in [p for p in self._placed if any(id(resident) in leaving for resident in p.residents)]:
            self._placed.remove(placed)
            staying = [resident for resident in placed.residents if id(resident) not in leaving]
            if staying:
                self._place(staying, [(placed, staying)], placed.steps)

    def _place(self, residents: list[Resident], sources: list[tuple[Placed, list[Resident]]], steps: int) -> Placed:
        """A new group of residents of others, which are given up."""
        end = max(resident.length for resident in residents)
        parts = [placed.group.taken([resident.row for resident in own], end) for placed, own in sources]
        keys, values = (
            [mx.concatenate(list(each)) if len(each) > 1 else each[0] for each in zip(*side, strict=True)]
            for side in zip(*parts, strict=True)
        )
        group = Group(keys, values, end, [end - resident.length for resident in residents])
        for row, resident in enumerate(residents):
            resident.group, resident.row = group, row
        placed = Placed(group, residents, steps)
        self._placed.append(placed)
        return placed

    def _flush(self, residents: Iterable[Resident]) -> None:
        """Write what the pool has not."""
        by_group: dict[int, list[Resident]] = {}
        for resident in residents:
            if resident.synced < resident.length:
                by_group.setdefault(id(resident.group), []).append(resident)
        for each in by_group.values():
            rows, pages = [resident.row for resident in each], [resident.pages for resident in each]
            starts, ends = [resident.synced for resident in each], [resident.length for resident in each]
            self.pool.write(each[0].group, rows, pages, starts, ends)
            for resident in each:
                resident.synced = resident.length

    def _sync(self, pages: Iterable[int]) -> None:
        """These pages are about to be read from the pool."""
        holders = {resident for page in pages for resident in self._holders.get(page, ())}
        if any(resident.lost for resident in holders):
            raise OutOfMemory("a step without memory took what this one builds on")
        self._flush(holders)

    def _forget(self, pages: Iterable[int], keep: Set[Resident]) -> None:
        """These pages are about to hold something else: whoever has them is a sequence of the past. Who waits together
        with one gives way as well: groups of ended requests go at once, not row by row."""
        past = {r for page in pages for r in self._holders.get(page, ()) if r not in keep}
        if past:
            for placed in self._placed:
                if placed.absent and not past.isdisjoint(placed.residents):
                    past.update(placed.residents)
            self._drop(past)

    def _take_up(self, table: Ints, start: int, end: int, resident: Resident | None) -> Resident:
        """The row's resident, with the pages that it holds after this step."""
        size = self.pool.page_size
        pages, first = table[: -(-end // size)].copy(), start // size
        held = 0 if resident is None else len(resident.pages)
        self._forget(pages[max(first, held) :].tolist(), keep=set() if resident is None else {resident})
        if resident is None:
            if start:
                self._sync(pages[: -(-start // size)].tolist())
                group = self.pool.read(pages, start)
            else:
                group = Group.empty(self._shapes, end)
            resident = Resident(group, 0, synced=start)
            self._placed.append(Placed(group, [resident], steps=1))
        for page in pages[held:].tolist():
            self._holders.setdefault(page, []).append(resident)
        resident.pages = pages
        return resident

    def _apart(self, resident: Resident) -> Placed:
        """Its group, without others."""
        placed = next(p for p in self._placed if p.group is resident.group)
        if len(placed.residents) == 1:
            return placed
        self._placed.remove(placed)
        others = [other for other in placed.residents if other is not resident]
        self._place(others, [(placed, others)], placed.steps)
        return self._place([resident], [(placed, [resident])], placed.steps)

    def _grouped(self, placed: list[Placed]) -> list[Placed]:
        """Groups that cost less together are joined, in their order, shortest first among those that are not; new ones
        only once they have come to stay."""
        if self._group_columns is None:
            columns = max(one.group.end for one in placed) * sum(len(one.residents) for one in placed)
            return [self._join(placed)] if len(placed) > 1 and columns <= self._room else placed
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
        residents = [resident for one in placed for resident in one.residents]
        return self._place(residents, [(one, one.residents) for one in placed], min(one.steps for one in placed))
