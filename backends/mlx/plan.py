"""Plans a step: where the KV of each row of a batch is, and which rows share a call of the model. Integers only.

A sequence that computes is resident: its KV is in one row of a group, the cache of one call of the model. The pool has
the pages that sequences share. A resident owns a page while the last positions of that page are in its group and not
yet in the pool.

The layers with a window have pages and a pool of their own. Their page ids follow those of the other layers, so one
table has the owners of all pages. A group drops the columns that the window has passed, after a write to their pages.

A row of a batch continues its resident, or takes over an idle resident that begins with the same tokens, or reads its
pages from the pool, or begins empty. A resident writes its new positions to the pool before another row reads them, and
when it leaves its group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from ...engine.batch import Batch
from ...engine.errors import OutOfMemory

# A group that no row of the batch uses stays for this number of steps: a row with a grammar computes every second step.
PATIENCE = 8
STEP = 256  # mlx-lm's caches grow by this number of columns


class Span(NamedTuple):
    """Positions start…length-1 of one row in a group."""

    row: int
    length: int
    start: int
    pages: list[int]  # the pages of positions 0…length-1
    window_pages: list[int] = []  # the same in the layers with a window; 0: not to be written

    def table(self, windowed: bool) -> list[int]:
        return self.window_pages if windowed else self.pages


class Write(NamedTuple):
    """An instruction: copy the KV of these spans from the group to the pages of the pool."""

    group: int
    spans: list[Span]


class Source(NamedTuple):
    """Where the KV of a new row comes from (positions 0…length-1): a row of another group, or pages of the pool."""

    length: int
    group: int  # number of the other group; 0: pages of the pool
    row: int
    pages: list[int]
    window_pages: list[int] = []
    first: int = 0  # first position to read from the pages of the layers with a window


class Drop(NamedTuple):
    """An instruction: drop the first columns of the group in the layers with a window."""

    group: int
    columns: int


class Make(NamedTuple):
    """An instruction: make a new group with one row for each source, and copy the KV of the source to it."""

    group: int
    sources: list[Source]


class Call(NamedTuple):
    """An instruction: call the model once, for `new` tokens of each row in a group."""

    group: int
    rows: list[int]  # row indices in the batch, in the order of the group's rows
    new: int


class Temporary(NamedTuple):
    """A row that is computed in a temporary group, because the groups that stay leave no room for it.

    The temporary group is dropped before the next row is computed."""

    make: Make
    call: Call
    write: Write


@dataclass(slots=True)
class Plan:
    """The instructions of a step, which run in the order of these fields. Groups that are not in `Planner.groups` are
    dropped."""

    writes: list[Write] = field(default_factory=list)
    copies: list[list[int]] = field(default_factory=list)  # [source page, target page] each
    window_copies: list[list[int]] = field(default_factory=list)  # the same in the layers with a window
    drops: list[Drop] = field(default_factory=list)
    temporary: list[Temporary] = field(default_factory=list)
    makes: list[Make] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def writes_pages(self) -> bool:
        return bool(self.writes or self.copies or self.window_copies or self.temporary)

    @property
    def sources(self) -> set[int]:
        """The numbers of the groups whose KV is copied to new groups (`makes`); 0: pages of the pool."""
        return {source.group for make in self.makes for source in make.sources}


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose KV is in a row of a group."""

    pages: list[int]
    window_pages: list[int]  # in the layers with a window; 0: the window has passed the page, and the pool has it
    length: int
    synced: int  # the pool has the KV of positions 0…synced-1
    first: int  # first position that the row has in the layers with a window
    group: int = 0  # 0: no group yet, the KV is in the pages
    row: int = 0
    step: int = 0  # the last step that computed this sequence

    @property
    def kept(self) -> int:
        """The number of positions that the row has in the layers with a window."""
        return self.length - self.first


@dataclass(slots=True, eq=False)
class Row:
    """A row of a batch: the step computes positions start…end-1 of a sequence."""

    index: int
    start: int
    end: int
    pages: list[int]  # the pages of positions 0…end-1
    window_pages: list[int]  # the same in the layers with a window; 0: the window has passed the page
    first: int  # first position that the row reads in the layers with a window
    resident: Resident  # has the KV of positions 0…start-1

    @property
    def new(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Window:
    """The layers with a window of `size` positions."""

    size: int
    first_page: int  # page ids of these layers follow this number
    share: float  # of these layers in the bytes of a position in all layers

    @property
    def columns(self) -> int:
        """The number of columns that a group keeps in these layers, before a step adds some."""
        return kept_columns(self.size)


def kept_columns(window: int) -> int:
    """The maximum number of columns that a row keeps for a window, and for a next turn that begins a little earlier."""
    return _in_steps(window) + 2 * STEP


class Planner:
    """Tracks the resident sequences (those whose KV is in a group), and plans the changes for each batch."""

    def __init__(self, page_size: int, room: int, group_columns: int, window: Window | None = None) -> None:
        """`room`: maximum number of columns (positions) in all groups together. `group_columns`: the number of padding
        columns whose read costs as much time as one more call of the model. `window`: None if no layer has one."""
        self.room = room
        self._page_size = page_size
        self._group_columns = group_columns
        self._window = window
        self._groups: dict[int, list[Resident]] = {}
        self._owners: dict[int, Resident] = {}  # page -> its owner
        self._lost: set[int] = set()  # pages whose last positions were lost with a failed step
        self._current: list[Resident] = []  # the residents that the last step computed
        self._step = 0
        self._numbers = count(1)

    @property
    def groups(self) -> Collection[int]:
        """The numbers of the groups that stay after the step."""
        return self._groups.keys()

    @property
    def columns(self) -> int:
        """The number of columns in all groups together."""
        return sum(self._columns(members) for members in self._groups.values())

    def plan(self, batch: Batch) -> Plan:
        """The plan of the step for a batch. Raises OutOfMemory if a row needs pages that a failed step lost."""
        self._current = []
        self._step += 1
        plan = Plan(copies=batch.page_copies[0].tolist())
        if self._window is not None:
            plan.window_copies = batch.page_copies[1].tolist()
        copied = self._copied_pages(plan)
        targets = {target for _, target in copied}
        rows = self._rows(batch)
        self._match([row for row in rows if row.start and row.resident.pages[-1] not in targets])
        self._write_for_readers(rows, targets, {source for source, _ in copied}, plan)
        overwritten = set(targets)
        for row in rows:
            self._trim(row, plan)
            overwritten.update(self._new_pages(row))
        self._lost -= overwritten
        present = {row.resident for row in rows}
        self._leave(present, overwritten, plan)
        for page in overwritten:
            self._owners.pop(page, None)
        self._drop_passed(plan)
        fitting = self._fit(rows, present, plan)
        self._place(fitting, plan)
        for row in fitting:
            self._advance(row)
        return plan

    def _rows(self, batch: Batch) -> list[Row]:
        """The rows of the batch, without padding rows (those on page 0). Each row has a new resident, which is in no
        group yet."""
        starts = batch.positions[batch.row_starts[:-1]].tolist()
        ends = batch.context_lens.tolist()
        rows: list[Row] = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            pages = batch.page_tables[0][index, : self._num_pages(end)].tolist()
            if pages and pages[0]:
                window_pages, first = self._window_pages(batch, index, start, end)
                count = self._num_pages(start)
                resident = Resident(pages[:count], window_pages[:count], start, start, first)
                rows.append(Row(index, start, end, pages, window_pages, first, resident))
        return rows

    def _window_pages(self, batch: Batch, index: int, start: int, end: int) -> tuple[list[int], int]:
        """The pages of a row in the layers with a window, and the first position that the row reads there."""
        if self._window is None:
            return [], 0
        pages = batch.page_tables[1][index, : self._num_pages(end)]
        return np.where(pages, pages + self._window.first_page, 0).tolist(), max(0, start + 1 - self._window.size)

    def _copied_pages(self, plan: Plan) -> list[tuple[int, int]]:
        """The copies [(source, target)] of all layers, as ids of pages."""
        first = 0 if self._window is None else self._window.first_page
        moved = [(source + first, target + first) for source, target in plan.window_copies]
        return [*((source, target) for source, target in plan.copies), *moved]

    def _num_pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _match(self, rows: list[Row]) -> None:
        """Find the resident sequence of each row: the one with exactly the row's pages and positions. If there is none,
        the row takes over an idle resident sequence that begins with the same positions and is the only one in its
        group."""
        by_end: dict[tuple[int, int], list[Resident]] = {}
        for resident in chain.from_iterable(self._groups.values()):
            by_end.setdefault((resident.pages[-1], resident.length), []).append(resident)
        for row in rows:
            row.resident = _take(by_end.get((row.resident.pages[-1], row.start), []), row)
        busy = {row.resident for row in rows}
        idle = [members[0] for members in self._groups.values() if len(members) == 1 and members[0] not in busy]
        for row in rows:
            if not row.resident.group:
                row.resident = _take(idle, row)

    def _write_for_readers(self, rows: list[Row], targets: Set[int], sources: Set[int], plan: Plan) -> None:
        """Plan writes to the pages that this step reads from the pool, if residents own newer positions of them.
        `sources` and `targets`: the pages that the step copies."""
        pages: set[int] = set()
        for row in rows:
            if not row.resident.group:
                pages.update(row.resident.pages, row.resident.window_pages[row.first // self._page_size :])
        pages -= targets
        pages |= sources
        if not self._lost.isdisjoint(pages):
            raise OutOfMemory("an earlier step ran out of memory and lost pages that this step reads")
        self._flush(dict.fromkeys(self._owners[page] for page in sorted(pages & self._owners.keys())), plan)

    def _trim(self, row: Row, plan: Plan) -> None:
        """Cut the row's resident to positions 0…row.start-1. Its later positions are written to the pool first."""
        resident = row.resident
        if resident.length > row.start:
            self._flush([resident], plan)
            resident.length = row.start
            resident.synced = row.start
            resident.pages = row.pages[: self._num_pages(row.start)]
            resident.window_pages = row.window_pages[: self._num_pages(row.start)]
            del self._groups[resident.group]
            self._gather([resident], plan)

    def _new_pages(self, row: Row) -> list[int]:
        """The pages of the row whose earlier content the step overwrites."""
        first = len(row.resident.pages) if row.resident.group else row.start // self._page_size
        return row.pages[first:] + row.window_pages[first:]

    def _flush(self, residents: Iterable[Resident], plan: Plan) -> None:
        """Plan writes to the pool: all positions of these residents that the pool does not have yet."""
        spans: dict[int, list[Span]] = {}
        for resident in residents:
            if resident.synced < resident.length:
                span = Span(
                    resident.row, resident.length, resident.synced, resident.pages, self._owned_window_pages(resident)
                )
                spans.setdefault(resident.group, []).append(span)
                self._disown(resident)
                resident.synced = resident.length
        plan.writes += [Write(group, rows) for group, rows in spans.items()]

    def _owned_window_pages(self, resident: Resident) -> list[int]:
        """The pages of the resident in the layers with a window, for a Span."""
        if self._window is None:
            return []
        first = self._window.first_page
        return [page - first if self._owners.get(page) is resident else 0 for page in resident.window_pages]

    def _dirty_pages(self, resident: Resident) -> list[int]:
        """The pages with positions that the pool does not have."""
        first = resident.synced // self._page_size
        return resident.pages[first:] + resident.window_pages[first:]

    def _disown(self, resident: Resident) -> None:
        for page in self._dirty_pages(resident):
            if self._owners.get(page) is resident:
                del self._owners[page]

    def _leave(self, present: Set[Resident], overwritten: Set[int], plan: Plan) -> None:
        """Remove the residents that have no row in the batch.

        They leave at once a group in which other residents have rows. A group in which no resident has a row stays for
        PATIENCE steps, unless the step overwrites one of its pages."""
        for group, members in list(self._groups.items()):
            absent = [resident for resident in members if resident not in present]
            if len(absent) < len(members):
                self._flush(absent, plan)
                continue
            pages = chain.from_iterable(resident.pages for resident in members)
            if self._step - members[0].step > PATIENCE or not overwritten.isdisjoint(pages):
                self._drop(group, plan)

    def _drop(self, group: int, plan: Plan) -> None:
        self._flush(self._groups.pop(group), plan)

    def _drop_passed(self, plan: Plan) -> None:
        """Drop columns that the windows have passed, in groups that have many of them. Their positions are written
        first."""
        if self._window is None:
            return
        for group, members in self._groups.items():
            columns = max(resident.kept for resident in members)
            passed = (columns - self._window.size) // STEP * STEP - STEP
            if columns > self._window.columns:
                self._flush(members, plan)
                plan.drops.append(Drop(group, passed))
                for resident in members:
                    resident.first = max(resident.first, resident.length - columns + passed)

    def _fit(self, rows: list[Row], present: Set[Resident], plan: Plan) -> list[Row]:
        """The rows that have a group or fit into a new one. Idle groups are dropped to make room. Rows that still do
        not fit get temporary groups."""
        idle: list[int] = []
        used = 0
        for group, members in self._groups.items():
            staying = [resident for resident in members if resident in present]
            used += self._columns(staying or members)
            if not staying:
                idle.append(group)
        fitting: list[Row] = []
        for row in rows:
            if row.resident.group:
                fitting.append(row)
                continue
            columns = self._row_columns(row.end)
            while idle and used + columns > self.room:
                used -= self._columns(self._groups[idle[0]])
                self._drop(idle.pop(0), plan)
            if used + columns > self.room:
                self._add_temporary(row, plan)
            else:
                used += columns
                fitting.append(row)
        return fitting

    def _add_temporary(self, row: Row, plan: Plan) -> None:
        make = self._make([row.resident])
        call = Call(make.group, [row.index], row.new)
        window_pages = self._table(row.window_pages)
        span = Span(0, row.end, row.start, row.pages, window_pages)
        plan.temporary.append(Temporary(make, call, Write(make.group, [span])))
        row.resident.pages = row.pages
        row.resident.window_pages = row.window_pages
        self._current.append(row.resident)

    def _place(self, rows: list[Row], plan: Plan) -> None:
        """Group rows into calls, and make the groups that the calls need."""
        by_kind: dict[tuple[str | int, ...], list[Row]] = {}
        for row in rows:
            by_kind.setdefault(self._kind(row), []).append(row)
        left: set[int] = set()
        for kind, similar in by_kind.items():
            for together in self._runs(similar) if kind[0] == "decode" else [similar]:
                members = [row.resident for row in together]
                if members != self._groups.get(members[0].group):
                    left.update(resident.group for resident in members)
                    self._gather(members, plan)
                plan.calls.append(Call(members[0].group, [row.index for row in together], together[0].new))
        for group in left - {0}:
            del self._groups[group]

    def _kind(self, row: Row) -> tuple[str | int, ...]:
        """A key: rows with equal keys share a call. Rows that decode every second step have another key than rows that
        decode every step."""
        resident = row.resident
        if not resident.group:
            return ("read", row.index) if row.start else ("begin", row.new)
        if row.new == 1:
            return ("decode", resident.step == self._step - 1)
        return ("prefill", resident.group, row.new)

    def _runs(self, rows: list[Row]) -> list[list[Row]]:
        """The decoding `rows`, split into runs of similar length where padding would cost more than another call."""
        runs: list[list[Row]] = []
        padded = 0
        for row in sorted(rows, key=lambda row: row.end):
            if runs:
                padded += (row.end - runs[-1][-1].end) * len(runs[-1])
            if not runs or padded > self._group_columns:
                runs.append([])
                padded = 0
            runs[-1].append(row)
        return [sorted(run, key=lambda row: row.index) for run in runs]

    def _gather(self, members: list[Resident], plan: Plan) -> None:
        """Plan a new group, which stays after the step, from residents of other groups and from pages of the pool."""
        make = self._make(members)
        plan.makes.append(make)
        self._groups[make.group] = members

    def _make(self, members: list[Resident]) -> Make:
        sources = [Source(x.length, x.group, x.row, x.pages, self._table(x.window_pages), x.first) for x in members]
        make = Make(next(self._numbers), sources)
        for position, resident in enumerate(members):
            resident.group = make.group
            resident.row = position
        return make

    def _merged_window_pages(self, row: Row) -> list[int]:
        """The pages of the row in the layers with a window, and those that its window has passed since the last write,
        unless the row got them again."""
        pages = row.window_pages
        earlier = row.resident.window_pages
        new = set(pages[len(earlier) :])
        for index in range(row.resident.synced // self._page_size, len(earlier)):
            if not pages[index] and earlier[index] not in new:
                pages[index] = earlier[index]
        return pages

    def _table(self, window_pages: list[int]) -> list[int]:
        """The pages as in the page table of the layers with a window."""
        first = 0 if self._window is None else self._window.first_page
        return [page and page - first for page in window_pages]

    def _columns(self, members: list[Resident]) -> int:
        """The number of columns of a group, padding included."""
        return len(members) * self._row_columns(max(resident.length for resident in members))

    def _row_columns(self, length: int) -> int:
        """The number of columns of a row with `length` positions: the mean of all layers."""
        columns = _in_steps(length + 1)
        if self._window is None:
            return columns
        return columns - int(self._window.share * max(0, columns - self._window.columns))

    def _advance(self, row: Row) -> None:
        """Record that the step computes the row: its resident gets the new positions and owns their pages."""
        resident = row.resident
        resident.pages = row.pages
        resident.window_pages = self._merged_window_pages(row)
        resident.length = row.end
        resident.step = self._step
        written = row.start // self._page_size
        self._owners.update(dict.fromkeys(row.pages[written:] + row.window_pages[written:], resident))
        self._current.append(resident)

    def release_all(self) -> Plan:
        """A plan that removes every resident, for an idle runner."""
        plan = Plan()
        for group in list(self._groups):
            self._drop(group, plan)
        self._current = []
        return plan

    def fail(self) -> None:
        """Record that the last planned step was not computed. The groups of its rows are dropped. Their positions
        that the pool does not have are lost."""
        temporary = [resident for resident in self._current if resident.group not in self._groups]
        for resident in self._current:
            self._groups.pop(resident.group, None)
            dirty = self._dirty_pages(resident)
            owner = resident if resident in temporary else None  # a row in a temporary group owns no pages
            self._lost.update(page for page in dirty if self._owners.get(page, owner) is resident)
            self._disown(resident)
        self._current = []

    def fail_all(self) -> None:
        """Record that all groups are lost, and so all positions that the pool does not have."""
        self._lost.update(self._owners)
        self._owners.clear()
        self._groups.clear()
        self._current = []


def _take(residents: list[Resident], row: Row) -> Resident:
    """The first resident in the list that begins with the row's positions 0…start-1; it is removed from the list. If
    there is none, the resident that the row has now."""
    head = row.resident.pages
    for resident in residents:
        if resident.length < row.start or resident.first > row.first:
            continue
        if resident.pages == head or resident.pages[: len(head)] == head:  # `==` without a slice copies nothing
            residents.remove(resident)
            return resident
    return row.resident


def _in_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP
