"""Where the rows of a batch lie: what one goes on with, begins in or reads, and where there is no room for it.

Who a row is, its pages tell: a row goes on with a resident that has exactly its pages up to its first position. One
that only begins with a resident's pages, or comes second, begins in the same arrays, as its heir: MLX copies them when
the row first writes, unless nobody else has them by then. Any other reads the pool.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...engine.batch import Batch, Ints
from . import caches
from .caches import Group, LayerShape, in_steps
from .failures import shortages
from .grouping import Groups
from .holders import Holders, Resident
from .pool import Pool
from .work import Steady, Work


@dataclass(slots=True, eq=False)
class Row:
    """A row of a batch: positions start…end-1 of a sequence are to be computed."""

    index: int
    start: int
    end: int
    pages: Ints  # with its positions 0…end-1
    head: Ints  # with those before its first, to be read

    @property
    def count(self) -> int:
        return self.end - self.start


class Residents:
    """Finds or makes room for every row of a batch, and keeps the pool right."""

    def __init__(
        self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, context: int, group_columns: int | None
    ) -> None:
        """`group_columns`: see Groups."""
        self._shapes, self._context = shapes, context
        self.pool = Pool(shapes, num_pages, page_size)
        self.groups = Groups(num_pages * page_size, group_columns)
        self._holders = Holders(self.pool)
        self._unasked: list[mx.array] = []
        self._begun: list[Resident] = []  # rows of the last step
        self._steady: Steady | None = None

    def goes_on(self, batch: Batch) -> Steady | None:
        """The last step, where its call computes this batch, too. Pages that are new are noted."""
        last, size = self._steady, self.pool.page_size
        if last is None or not self.groups.unchanging(len(last.work.groups)) or not last.goes_on(batch):
            return None
        new = np.flatnonzero(batch.positions % size == 0)
        for row in new.tolist():
            resident, pages = last.residents[row], batch.page_tables[0][row, : batch.positions[row] // size + 1]
            self._forget([int(pages[-1])], keep={resident})
            self._holders.hold(resident, pages)
        if len(new):
            self._steady = last = Steady(last.work, last.residents, batch, size)
        return last

    def begin(self, batch: Batch) -> Iterator[Work]:
        """The calls that compute a batch that does not go on with the last one, in order; inert rows (all on page 0)
        are in none of them.

        Pages hold what rows share once, groups for each row: rows that find no room in groups pass one by one.
        """
        self._begun, self._steady = [], None
        rows = self._rows(batch)
        self._copy(batch.page_copies[0], rows)
        found = self._going_on(rows)
        present = set(found.values())
        heirs = {row: heir for row in rows if row not in found and row.start and (heir := self._heir(row)) is not None}
        self._begun = list(heirs.values())
        found |= heirs
        away, past = self.groups.settle(present)
        self._drop(past)
        self._drop(away, unsure=found.values())
        read = {int(row.head[-1]) for row in rows if len(row.head)}
        self._forget(self._new_pages(rows, found), keep=set(found.values()), read=read)
        joining = self._joining(rows, found, heirs)
        passing = [row for row in rows if row not in joining]
        self._drop([heirs[row] for row in passing if row in heirs])
        self._begun = [heirs[row] for row in joining if row in heirs]
        # First those that write the pool: it could not be written in place while rows are about to read it.
        for row in passing:
            yield from self._passing(row)
        taken = {row: self._take_up(row, found.get(row)) for row in joining}
        self._begun = list(taken.values())
        yield from self._prompts({row: resident for row, resident in taken.items() if row.count > 1})
        yield from self._decoding({row: resident for row, resident in taken.items() if row.count == 1}, batch)

    def _rows(self, batch: Batch) -> list[Row]:
        """Those that are not inert."""
        starts, ends = batch.positions[batch.row_starts[:-1]].tolist(), batch.context_lens.tolist()
        rows, size = list[Row](), self.pool.page_size
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            pages = batch.page_tables[0][index, : -(-end // size)]
            if len(pages) and pages[0]:
                rows.append(Row(index, start, end, pages, pages[: -(-start // size)]))
        return rows

    def _copy(self, copies: Ints, rows: list[Row]) -> None:
        """A page copied for a row that begins within it is read where it comes from, as long as that is what it was;
        all other copies are made."""
        if not len(copies):
            return
        sources = {target: source for source, target in copies.tolist()}
        written = self._new_pages(rows, {})
        for row in rows:
            target = int(row.head[-1]) if row.start % self.pool.page_size else 0
            if target in sources and sources[target] not in written:
                row.head = np.append(row.head[:-1], np.int32(sources.pop(target)))
        if sources:
            self._holders.sync(sources.values())
            self._forget(sources, keep=set())
            with shortages():
                self.pool.copy(np.array([(source, target) for target, source in sources.items()]))

    def _new_pages(self, rows: list[Row], found: dict[Row, Resident]) -> list[int]:
        """Those that hold something else after this step than before."""
        size, new = self.pool.page_size, list[int]()
        for row in rows:
            held = len(found[row].pages) if row in found else 0
            new += row.pages[max(row.start // size, held) :].tolist()
        return new

    def _going_on(self, rows: list[Row]) -> dict[Row, Resident]:
        """Whose caches rows go on with: of several that begin with the same whole pages, the first does."""
        found, taken = dict[Row, Resident](), set[Resident]()
        for row in rows:
            if row.start == 0 or row.head[-1] != row.pages[len(row.head) - 1]:
                continue
            for resident in self._holders.having_just(row.head, row.start):
                if resident not in taken:
                    found[row] = resident
                    taken.add(resident)
                    break
        return found

    def _heir(self, row: Row) -> Resident | None:
        """For a row that begins as a resident does."""
        other, size = self._holders.having(row.head, row.start), self.pool.page_size
        if other is None:
            return None
        whole = row.start // size
        heir = Resident(other.group.begun(other.row, row.start, self._needs(row)), 0, min(other.synced, whole * size))
        self._holders.hold(heir, row.head[:whole])
        return heir

    def _joining(self, rows: list[Row], found: dict[Row, Resident], heirs: dict[Row, Resident]) -> list[Row]:
        """Those that go on, or find room among the groups, where heirs lie from now on."""
        joining, claimed = list[Row](), 0
        for row in rows:
            if row in heirs or row not in found:
                held = heirs[row].group.columns if row in heirs else 0
                takes = max(held, self._needs(row))
                if not self.make_room(claimed + takes, found.values()):
                    continue
                if row in heirs:
                    self.groups.place(heirs[row].group, [heirs[row]])
                else:
                    self._holders.sync(row.head)
                claimed += takes - held  # what is placed is counted
            joining.append(row)
        return joining

    def make_room(self, columns: int, computing: Collection[Resident]) -> bool:
        """For so many beside those placed; groups that wait for their rows give way. `computing`: in this step."""
        if self.groups.columns + columns > self.groups.room:
            self._drop(self.groups.waiting, unsure=computing)
        return self.groups.columns + columns <= self.groups.room

    def _take_up(self, row: Row, resident: Resident | None) -> Resident:
        """Who lies in a group now, and holds the row's pages after this step."""
        if resident is None:
            group = self.pool.read(row.head, row.start) if row.start else Group.empty(self._shapes, row.end)
            # A begun page may be another's, of which this row has a copy: it is written whole.
            resident = Resident(group, 0, synced=row.start // self.pool.page_size * self.pool.page_size)
            self.groups.place(group, [resident])
        self._holders.hold(resident, row.pages)
        return resident

    def _passing(self, row: Row) -> Iterator[Work]:
        """One that is read from the pool, computed, and written back."""
        self._holders.sync(row.head)
        resident = self._take_up(row, None)
        self._begun.append(resident)
        yield Work([row.index], [resident.group], [row.count], self._filled(row), passing=True)
        self._drop([resident])
        self._begun.remove(resident)
        with shortages():
            mx.eval(self.take_changed())

    def _prompts(self, taken: dict[Row, Resident]) -> Iterator[Work]:
        """Those that are filled up to the same number are computed in one call, and new ones of one length, whose
        attention is then one call, too, lie together from the beginning."""
        calls: dict[int, dict[tuple[int, int], list[Row]]] = {}
        for row, resident in taken.items():
            alike = (row.count, -1) if row.start == 0 else (row.count, row.index)
            calls.setdefault(self._filled(row), {}).setdefault(alike, []).append(row)
            self.groups.part(resident)
        for filled, alike_rows in calls.items():
            for rows in alike_rows.values():
                if len(rows) > 1:
                    group = Group.empty(self._shapes, rows[0].count, len(rows))
                    self.groups.place(group, [taken[row] for row in rows])
            order = [row.index for rows in alike_rows.values() for row in rows]
            firsts = [rows[0] for rows in alike_rows.values()]
            yield Work(order, [taken[row].group for row in firsts], [row.count for row in firsts], filled)

    def _filled(self, row: Row) -> int:
        """How many tokens are computed of it: a model need not know positions beyond its context."""
        filled = caches.filled(row.count, self._shapes)
        return filled if row.start + filled <= self._context else row.count

    def _needs(self, row: Row) -> int:
        """Columns of a new group of it."""
        return in_steps(max(row.start + self._filled(row), row.end + 1))

    def _decoding(self, taken: dict[Row, Resident], batch: Batch) -> Iterator[Work]:
        """Those with one token each, all in one call."""
        if not taken:
            return
        indices = {resident: row.index for row, resident in taken.items()}
        decoding = [placed for placed in self.groups if placed.residents[0] in indices]
        # In the batch's order: see Steady.
        together = self.groups.joined(sorted(decoding, key=lambda placed: indices[placed.residents[0]]))
        order = [indices[resident] for placed in together for resident in placed.residents]
        work = Work(order, [placed.group for placed in together], [1] * len(together))
        if len(taken) == batch.num_rows:
            self._steady = Steady(work, list(taken.values()), batch, self.pool.page_size)
        yield work

    def _forget(self, pages: Collection[int], keep: Set[Resident], read: Set[int] = frozenset()) -> None:
        """These pages are about to hold something else, those to be `read` behind what they hold: whoever has them
        gives up its place, but for `keep`."""
        gone = set(pages) - read
        if past := self._holders.past(pages, keep, gone):
            self._drop(self.groups.waiting_with(past), gone)

    def _drop(
        self, residents: Iterable[Resident], gone: Collection[int] = (), unsure: Collection[Resident] = ()
    ) -> None:
        """They lie nowhere and hold nothing any more. `gone`, `unsure`: see Holders.release."""
        leaving = dict.fromkeys(residents)
        self._holders.release(leaving, gone, unsure)
        self.groups.remove(leaving)

    def rest(self) -> None:
        """Nobody computes: groups give their memory up, and their rows are read from the pool when they come again."""
        self._drop(self.groups.residents)
        self._begun, self._steady = [], None

    def give_up(self) -> None:
        """The step begun last was not computed: what only its rows' caches held is lost, and their memory free."""
        self._lose(self._begun)
        self.ask_again()

    def give_up_all(self) -> None:
        """Of no step it is known what was computed: what only caches hold is lost."""
        self._lose(self.groups.residents)

    def _lose(self, residents: list[Resident]) -> None:
        self._holders.lose(residents)
        self.groups.lose(residents)
        self._begun, self._steady = [], None

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

    def ask_again(self) -> None:
        """What take_changed() named was not computed: what the pool had to hold before is still to be."""
        self.pool.changed = True
