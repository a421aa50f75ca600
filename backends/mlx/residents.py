"""Which sequences' caches lie in groups, and which pages of the pool hold them as well.

The engine speaks of pages only. A page's content is in the pool, or on its way there: the sequence that wrote it is
resident in a group, where attention reads it fastest, and its new positions are copied to the pool when it leaves or
when somebody else is about to read them. Who a row is, its pages tell: a row goes on with a resident that has exactly
its pages up to its first position. One that only begins with a resident's pages, or comes second, begins in the same
arrays: MLX copies them when the row first writes, unless nobody else has them by then. Any other reads the pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
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

    def begun(self, start: int, columns: int) -> Group:
        """Its positions 0…start-1 as a row of their own, which holds the same arrays: only as many columns as that
        needs, unless few are too many."""
        own, first = slice(self.row, self.row + 1), self.group.padding[self.row]
        if self.group.keys[0].shape[2] <= first + columns + STEP:
            columns += STEP
        keys, values = (
            [x[own, :, first : first + columns] for x in held] for held in (self.group.keys, self.group.values)
        )
        return Group(keys, values, start, [0])


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
        starts = batch.positions[batch.row_starts[:-1]].tolist()
        ends = batch.context_lens.tolist()
        counts = np.diff(batch.row_starts).tolist()
        real = [row for row in range(batch.num_rows) if batch.page_table.shape[1] and batch.page_table[row, 0]]
        heads = self._heads(batch, real, starts, ends)
        found: dict[int, Resident | None] = {}
        present: set[Resident] = set()
        for row in real:
            found[row] = resident = self._find(batch.page_table[row], heads[row], starts[row], present)
            present |= {resident} if resident is not None else set()
        for row in real:
            if found[row] is None and starts[row]:
                found[row] = resident = self._heir(heads[row], starts[row], ends[row])
                self._begun += [resident] if resident is not None else []
        heirs = set(self._begun)
        self._settle(present)
        begun = {int(head[-1]) for head in heads.values() if len(head)}
        self._forget(self._new_pages(batch, found, starts, ends), keep=present | heirs, read=begun)
        joining, passing, claimed = list[int](), list[int](), 0
        for row in real:
            resident = found[row]
            if (resident is None or resident in heirs) and not self._has_room(ends[row], claimed):
                passing.append(row)
                continue
            if resident is None:
                self._sync(heads[row])
                claimed += _columns(ends[row])
            elif resident in heirs:
                self._placed.append(Placed(resident.group, [resident], steps=1))
            joining.append(row)
        self._drop([resident for row in passing if (resident := found[row]) is not None])
        # First those that write the pool: it could not be written in place while rows are about to read it.
        for row in passing:
            yield from self._passing(batch.page_table[row], heads[row], row, starts[row], counts[row])
        taken = {
            row: self._take_up(batch.page_table[row], heads[row], starts[row], ends[row], found[row]) for row in joining
        }
        self._begun = list(taken.values())
        yield from self._prompts({row: r for row, r in taken.items() if counts[row] > 1}, starts, counts)
        yield from self._decoding({row: r for row, r in taken.items() if counts[row] == 1}, batch)

    def _heads(self, batch: Batch, real: list[int], starts: list[int], ends: list[int]) -> dict[int, Ints]:
        """The pages with each row's positions before its first. A page copied for a row that begins within it is read
        where it comes from, as long as that is what it was; all other copies are made."""
        size, heads = self.pool.page_size, dict[int, Ints]()
        copies = {target: source for source, target in batch.copies.tolist()}
        written = self._new_pages(batch, dict.fromkeys(real), starts, ends) if copies else []
        for row in real:
            heads[row] = head = batch.page_table[row, : -(-starts[row] // size)]
            if starts[row] % size and (source := copies.get(int(head[-1]), 0)) and source not in written:
                del copies[int(head[-1])]
                heads[row] = np.append(head[:-1], np.int32(source))
        if copies:
            self._sync(copies.values())
            self._forget(copies, keep=set())
            with shortages():
                self.pool.copy(np.array([(source, target) for target, source in copies.items()]))
        return heads

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

    def _passing(self, table: Ints, head: Ints, row: int, start: int, count: int) -> Iterator[Work]:
        """One that is read from the pool, computed, and written back."""
        self._sync(head)
        resident = self._take_up(table, head, start, start + count, None)
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
        filled = caches.filled(new, self._shapes)
        return filled if start + filled <= self._context else new

    def _new_pages(
        self, batch: Batch, found: dict[int, Resident | None], starts: list[int], ends: list[int]
    ) -> list[int]:
        """Those that hold something else after this step than before."""
        size, new = self.pool.page_size, list[int]()
        for row, resident in found.items():
            held = 0 if resident is None else len(resident.pages)
            new += batch.page_table[row, max(starts[row] // size, held) : -(-ends[row] // size)].tolist()
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
            resident.lost = True
        for resident in residents:
            safe = self._others(resident, resident.synced) // self.pool.page_size
            for page in set(resident.pages[:safe].tolist()):
                self._holders[page].remove(resident)
            resident.pages = resident.pages[safe:]
        for resident in residents:
            self._placed = [placed for placed in self._placed if placed.group is not resident.group]
            resident.group, resident.row = Group([], [], 0, [0]), 0
        self._begun, self._steady = [], None

    def _others(self, resident: Resident, start: int, leaving: Collection[Resident] = ()) -> int:
        """From `start` on, up to which position there are others that have its pages, and stay."""
        size = self.pool.page_size
        for index in range(start // size, len(resident.pages)):
            end = min((index + 1) * size, resident.length)
            if not any(
                other is not resident and not other.lost and other.length >= end and other not in leaving
                for other in self._holders[int(resident.pages[index])]
            ):
                break
            start = max(start, end)
        return start

    def ask_again(self) -> None:
        """What take_changed() named was not computed: what the pool had to hold before is still to be."""
        self.pool.changed = True

    def rest(self) -> None:
        """Nobody computes: groups give their memory up, and their rows are read from the pool when they come again."""
        self._drop([resident for placed in self._placed for resident in placed.residents])
        self._begun, self._steady = [], None

    def _has_room(self, end: int, claimed: int) -> bool:
        """For a row up to `end` beside those placed and `claimed` columns; groups that wait for their rows give way."""
        needed = claimed + _columns(end)
        if self._columns() + needed > self._room:
            absent = [resident for placed in self._placed if placed.absent for resident in placed.residents]
            self._flush(absent, [*absent, *self._begun])  # what only this step's rows would hold is lost where it fails
            self._drop(absent)
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

    def _find(self, table: Ints, head: Ints, start: int, taken: Set[Resident]) -> Resident | None:
        """Whose cache the row goes on with; `taken` by rows that begin with the same whole pages."""
        if start == 0 or head[-1] != table[len(head) - 1]:
            return None
        for resident in self._holders.get(int(head[-1]), ()):
            if resident.length == start and np.array_equal(resident.pages, head) and resident not in taken:
                return resident
        return None

    def _heir(self, head: Ints, start: int, end: int) -> Resident | None:
        """A row that begins as a resident does."""
        for other in self._holders.get(int(head[-1]), ()):
            if other.length >= start and np.array_equal(other.pages[: len(head)], head):
                heir = Resident(other.begun(start, _columns(end)), 0)
                self._hold(heir, head[: start // self.pool.page_size])
                heir.synced = min(other.synced, start // self.pool.page_size * self.pool.page_size)
                return heir
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

    def _drop(self, residents: Iterable[Resident], gone: Collection[int] = ()) -> None:
        """`gone`: pages whose content nobody asks for."""
        leaving = {id(resident): resident for resident in residents}
        self._flush(leaving.values(), leaving.values(), gone)
        for resident in leaving.values():
            for page in set(resident.pages.tolist()):
                self._holders[page].remove(resident)
        for placed in [p for p in self._placed if any(id(resident) in leaving for resident in p.residents)]:
            self._placed.remove(placed)
            staying = [resident for resident in placed.residents if id(resident) not in leaving]
            if staying:
                self._place(staying, [(placed, staying)], placed.steps)
        for resident in leaving.values():  # whoever still knows them: heirs write where they alone are
            resident.group.keys, resident.group.values = [], []

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
                self.pool.write(each[0].group, rows, pages, starts, ends)
            for resident, start, end in spans:
                if start == resident.synced:
                    self._written(resident, end)

    def _owed(self, resident: Resident, leaving: Collection[Resident], gone: Collection[int]) -> tuple[int, int]:
        """What is to be written of it: see _flush. An heir's begun page is yet to come."""
        start, used = resident.synced, len(resident.pages)
        while used and resident.pages[used - 1] in gone:
            used -= 1
        if leaving:
            start = self._others(resident, start, leaving)
        return start, min(resident.length, used * self.pool.page_size)

    def _written(self, resident: Resident, end: int) -> None:
        """The pool has its positions 0…end-1: whoever else has its pages need not write them."""
        size, before = self.pool.page_size, resident.synced
        resident.synced = end
        new = resident.pages[before // size : -(-end // size)].tolist()
        for other in {other for page in new for other in self._holders[page]}:
            most = min(len(resident.pages), len(other.pages))
            differ = np.flatnonzero(resident.pages[:most] != other.pages[:most])
            same = size * int(differ[0] if len(differ) else most)
            other.synced = max(other.synced, min(end, same, other.length))

    def _sync(self, pages: Iterable[int]) -> None:
        """These pages are about to be read from the pool."""
        holders = {resident for page in pages for resident in self._holders.get(page, ())}
        if any(resident.lost for resident in holders):
            raise OutOfMemory("a step without memory took what this one builds on")
        self._flush(holders)

    def _forget(self, pages: Collection[int], keep: Set[Resident], read: Set[int] = frozenset()) -> None:
        """These pages are about to hold something else, those to be `read` behind what they hold: whoever has them is a
        sequence of the past. Who waits together with one gives way as well: groups of ended requests go at once, not
        row by row."""
        changed = set(pages)
        past = {r for page in pages for r in self._holders.get(page, ()) if r not in keep}
        past = {resident for resident in past if not self._shortened(resident, changed, changed - read, past)}
        if past:
            for placed in self._placed:
                if placed.absent and not past.isdisjoint(placed.residents):
                    past.update(placed.residents)
            self._drop(past, changed - read)

    def _shortened(self, resident: Resident, changed: Set[int], gone: Set[int], past: Set[Resident]) -> bool:
        """One that lies alone stays without its last pages, where the others are still to be written: that can wait."""
        start, end = self._owed(resident, past, gone)
        used = -(-end // self.pool.page_size)
        if start >= end or len(resident.group.padding) > 1 or not changed.isdisjoint(resident.pages[:used].tolist()):
            return False
        for page in resident.pages[used:].tolist():
            self._holders[page].remove(resident)
        resident.pages = resident.pages[:used]
        return True

    def _take_up(self, table: Ints, head: Ints, start: int, end: int, resident: Resident | None) -> Resident:
        """The row's resident, with the pages that it holds after this step."""
        size = self.pool.page_size
        if resident is None:
            group = self.pool.read(head, start) if start else Group.empty(self._shapes, end)
            # A begun page may be another's, of which this row has a copy: it is written whole.
            resident = Resident(group, 0, synced=start // size * size)
            self._placed.append(Placed(group, [resident], steps=1))
        self._hold(resident, table[: -(-end // size)])
        return resident

    def _hold(self, resident: Resident, pages: Ints) -> None:
        """Those it holds, and more."""
        for page in pages[len(resident.pages) :].tolist():
            self._holders.setdefault(page, []).append(resident)
        resident.pages = pages.copy()

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


def _columns(end: int) -> int:
    """Of a new group of one row up to `end`."""
    return -(-(end + 1) // STEP) * STEP
