"""Plans a step: where the KV of each row of a batch is, and which rows share a call of the model. Integers only.

A sequence that computes is resident: its KV is in one row of a group, the cache of one call of the model. The pool has
the pages that sequences share. A resident owns a page while only its group has the newest positions of that page.

A row of a batch continues its resident, or takes over an idle resident that begins with the same tokens, or reads its
pages from the pool, or begins empty. A resident writes its new positions to the pool before another row reads them, and
when it leaves its group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from ...engine.batch import Batch
from ...engine.errors import OutOfMemory

PATIENCE = 8  # steps that a group without a row in the batch stays: a row with a grammar computes every second step
STEP = 256  # columns that caches of mlx-lm grow by


class Span(NamedTuple):
    """Positions start…length-1 of a row of a group."""

    row: int
    length: int
    start: int
    pages: list[int]  # of positions 0…length-1


class Write(NamedTuple):
    """Write positions of a group's rows to their pages."""

    group: int
    spans: list[Span]


class Source(NamedTuple):
    """The origin of a new row's positions 0…length-1: a row of another group, or pages."""

    length: int
    group: int  # 0: pages
    row: int
    pages: list[int]


class Make(NamedTuple):
    """Make a group with a row from each source."""

    group: int
    sources: list[Source]


class Call(NamedTuple):
    """Compute `new` tokens of each row of a group."""

    group: int
    rows: list[int]  # of the batch, in the order of the group's rows
    new: int


class Temporary(NamedTuple):
    """A row without room for a group that stays. Its group is dropped before the next row is computed."""

    make: Make
    call: Call
    write: Write


@dataclass(slots=True)
class Plan:
    """A step, in the order of these fields. Groups that `Planner.groups` does not name are dropped."""

    writes: list[Write] = field(default_factory=list)
    copies: list[list[int]] = field(default_factory=list)  # pages: source and target
    temporary: list[Temporary] = field(default_factory=list)
    makes: list[Make] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def writes_pages(self) -> bool:
        return bool(self.writes or self.copies or self.temporary)

    @property
    def sources(self) -> set[int]:
        """Groups whose rows others take."""
        return {source.group for make in self.makes for source in make.sources}


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose KV is in a row of a group."""

    pages: list[int]
    length: int
    synced: int  # the first positions, which the pool has
    group: int = 0  # 0: none yet, its KV is in its pages
    row: int = 0
    step: int = 0  # the last step that computed it


@dataclass(slots=True, eq=False)
class Row:
    """A row of a batch: positions start…end-1 of a sequence are to be computed."""

    index: int
    start: int
    end: int
    pages: list[int]  # of positions 0…end-1
    resident: Resident  # with positions 0…start-1

    @property
    def new(self) -> int:
        return self.end - self.start


class Planner:
    """Tracks the resident sequences, and plans the changes for each batch."""

    def __init__(self, page_size: int, room: int, group_columns: int) -> None:
        """`room`: columns (positions) of all groups together. `group_columns`: padded columns that cost as much to read
        as one more call of the model."""
        self.room = room
        self._page_size = page_size
        self._group_columns = group_columns
        self._groups: dict[int, list[Resident]] = {}
        self._owners: dict[int, Resident] = {}  # by page
        self._lost: set[int] = set()  # pages whose newest positions were in a failed step
        self._current: list[Resident] = []  # rows of the last step
        self._step = 0
        self._numbers = count(1)

    @property
    def groups(self) -> Collection[int]:
        """Groups that stay after the step."""
        return self._groups.keys()

    @property
    def columns(self) -> int:
        """Columns of all groups."""
        return sum(_columns(members) for members in self._groups.values())

    def plan(self, batch: Batch) -> Plan:
        """The step for a batch. Raises OutOfMemory if a row needs pages that a failed step lost."""
        self._current = []
        self._step += 1
        copies = batch.page_copies[0]
        plan = Plan(copies=copies.tolist())
        targets = set(copies[:, 1].tolist())
        rows = self._rows(batch)
        self._match([row for row in rows if row.start and row.resident.pages[-1] not in targets])
        self._write_for_readers(rows, targets, plan)
        overwritten = set(targets)
        for row in rows:
            self._trim(row, plan)
            overwritten.update(self._new_pages(row))
        self._lost -= overwritten
        present = {row.resident for row in rows}
        self._leave(present, overwritten, plan)
        fitting = self._fit(rows, present, plan)
        self._place(fitting, plan)
        for row in fitting:
            self._advance(row)
        return plan

    def _rows(self, batch: Batch) -> list[Row]:
        """Rows of the batch, without inert ones, which are on page 0. No row has a group yet."""
        starts = batch.positions[batch.row_starts[:-1]].tolist()
        ends = batch.context_lens.tolist()
        rows: list[Row] = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            pages = batch.page_tables[0][index, : self._num_pages(end)].tolist()
            if pages and pages[0]:
                rows.append(Row(index, start, end, pages, Resident(pages[: self._num_pages(start)], start, start)))
        return rows

    def _num_pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _match(self, rows: list[Row]) -> None:
        """Find the resident that a row continues, which has exactly its pages and positions, or takes over: an idle one
        that begins with them and is alone in its group."""
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

    def _write_for_readers(self, rows: list[Row], targets: Set[int], plan: Plan) -> None:
        """Write the pages that this step reads from the pool and that a resident owns."""
        pages: set[int] = set()
        for row in rows:
            if not row.resident.group:
                pages.update(row.resident.pages)
        pages -= targets
        pages.update(source for source, _ in plan.copies)
        if not self._lost.isdisjoint(pages):
            raise OutOfMemory("a step without memory lost pages that this step reads")
        self._flush(dict.fromkeys(self._owners[page] for page in sorted(pages & self._owners.keys())), plan)

    def _trim(self, row: Row, plan: Plan) -> None:
        """Cut the resident of a row to the row's first positions. Its other positions are written first."""
        resident = row.resident
        if resident.length > row.start:
            self._flush([resident], plan)
            resident.length = row.start
            resident.synced = row.start
            resident.pages = row.pages[: self._num_pages(row.start)]
            del self._groups[resident.group]
            self._gather([resident], plan)

    def _new_pages(self, row: Row) -> list[int]:
        """Pages whose earlier content the step overwrites."""
        return row.pages[len(row.resident.pages) if row.resident.group else row.start // self._page_size :]

    def _flush(self, residents: Iterable[Resident], plan: Plan) -> None:
        """Write the positions that only the groups of these residents have."""
        spans: dict[int, list[Span]] = {}
        for resident in residents:
            if resident.synced < resident.length:
                span = Span(resident.row, resident.length, resident.synced, resident.pages)
                spans.setdefault(resident.group, []).append(span)
                self._disown(resident)
                resident.synced = resident.length
        plan.writes += [Write(group, rows) for group, rows in spans.items()]

    def _disown(self, resident: Resident) -> None:
        for page in resident.pages[resident.synced // self._page_size :]:
            if self._owners.get(page) is resident:
                del self._owners[page]

    def _leave(self, present: Set[Resident], overwritten: Set[int], plan: Plan) -> None:
        """Remove residents without a row. They leave a group at once if others continue in it. A group without any row
        stays for some steps, unless the step overwrites one of its pages."""
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

    def _fit(self, rows: list[Row], present: Set[Resident], plan: Plan) -> list[Row]:
        """Rows in a group or with room for one. Idle groups leave to make room. Other rows get temporary groups."""
        idle: list[int] = []
        used = 0
        for group, members in self._groups.items():
            staying = [resident for resident in members if resident in present]
            used += _columns(staying or members)
            if not staying:
                idle.append(group)
        fitting: list[Row] = []
        for row in rows:
            columns = 0 if row.resident.group else _in_steps(row.end + 1)
            while columns and idle and used + columns > self.room:
                used -= _columns(self._groups[idle[0]])
                self._drop(idle.pop(0), plan)
            if columns and used + columns > self.room:
                self._add_temporary(row, plan)
            else:
                used += columns
                fitting.append(row)
        return fitting

    def _add_temporary(self, row: Row, plan: Plan) -> None:
        make = self._make([row.resident])
        call = Call(make.group, [row.index], row.new)
        plan.temporary.append(Temporary(make, call, Write(make.group, [Span(0, row.end, row.start, row.pages)])))
        row.resident.pages = row.pages
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
        """Rows of one kind share a call. Rows that decode every second step do not join those that always do."""
        resident = row.resident
        if not resident.group:
            return ("read", row.index) if row.start else ("begin", row.new)
        if row.new == 1:
            return ("decode", resident.step == self._step - 1)
        return ("prefill", resident.group, row.new)

    def _runs(self, rows: list[Row]) -> list[list[Row]]:
        """Rows that decode, split where padding would cost more than another call."""
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
        """Make a group that stays from residents of other groups and from pages."""
        make = self._make(members)
        plan.makes.append(make)
        self._groups[make.group] = members

    def _make(self, members: list[Resident]) -> Make:
        make = Make(next(self._numbers), [Source(x.length, x.group, x.row, x.pages) for x in members])
        for position, resident in enumerate(members):
            resident.group = make.group
            resident.row = position
        return make

    def _advance(self, row: Row) -> None:
        """The step computes the row: its resident has the new positions and owns their pages."""
        resident = row.resident
        resident.pages = row.pages
        resident.length = row.end
        resident.step = self._step
        self._owners.update(dict.fromkeys(row.pages[row.start // self._page_size :], resident))
        self._current.append(resident)

    def release_all(self) -> Plan:
        """A plan that removes every resident, for an idle runner."""
        plan = Plan()
        for group in list(self._groups):
            self._drop(group, plan)
        self._current = []
        return plan

    def fail(self) -> None:
        """The last planned step was not computed: the positions that only the groups of its rows had are lost."""
        for resident in self._current:
            self._groups.pop(resident.group, None)
            dirty = resident.pages[resident.synced // self._page_size :]
            self._lost.update(page for page in dirty if self._owners.get(page, resident) is resident)
            self._disown(resident)
        self._current = []

    def fail_all(self) -> None:
        """The positions that only groups had are lost."""
        self._lost.update(self._owners)
        self._owners.clear()
        self._groups.clear()
        self._current = []


def _take(residents: list[Resident], row: Row) -> Resident:
    """Remove the first resident that has the row's first positions from the list, and return it. Without one, the row's
    resident stays."""
    head = row.resident.pages
    for resident in residents:
        if resident.length < row.start:
            continue
        if resident.pages == head or resident.pages[: len(head)] == head:  # the first comparison copies nothing
            residents.remove(resident)
            return resident
    return row.resident


def _columns(members: list[Resident]) -> int:
    """Columns of a group, with padding."""
    return len(members) * _in_steps(max(resident.length for resident in members) + 1)


def _in_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP
