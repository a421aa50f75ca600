"""Plans a step: where the KV of each row of a batch is, and which rows share a call of the model. Integers only.

A sequence that computes is resident: its KV is in one row of a group, the cache of one call of the model. The pool has
the pages that sequences share. A resident owns a page while the last positions of that page are in its group and not
yet in the pool.

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

# A group that no row of the batch uses stays for this number of steps: a row with a grammar computes every second step.
PATIENCE = 8
STEP = 256  # mlx-lm's caches grow by this number of columns


class Span(NamedTuple):
    """Positions start…length-1 of one row in a group."""

    row: int
    length: int
    start: int
    pages: list[int]  # the pages of positions 0…length-1


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
    temporary: list[Temporary] = field(default_factory=list)
    makes: list[Make] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def writes_pages(self) -> bool:
        return bool(self.writes or self.copies or self.temporary)

    @property
    def sources(self) -> set[int]:
        """The numbers of the groups whose KV is copied to new groups (`makes`); 0: pages of the pool."""
        return {source.group for make in self.makes for source in make.sources}


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose KV is in a row of a group."""

    pages: list[int]
    length: int
    synced: int  # the pool has the KV of positions 0…synced-1
    group: int = 0  # 0: no group yet, the KV is in the pages
    row: int = 0
    step: int = 0  # the last step that computed this sequence


@dataclass(slots=True, eq=False)
class Row:
    """A row of a batch: the step computes positions start…end-1 of a sequence."""

    index: int
    start: int
    end: int
    pages: list[int]  # the pages of positions 0…end-1
    resident: Resident  # has the KV of positions 0…start-1

    @property
    def new(self) -> int:
        return self.end - self.start


class Planner:
    """Tracks the resident sequences (those whose KV is in a group), and plans the changes for each batch."""

    def __init__(self, page_size: int, room: int, group_columns: int) -> None:
        """`room`: maximum number of columns (positions) in all groups together. `group_columns`: the number of padding
        columns whose read costs as much time as one more call of the model."""
        self.room = room
        self._page_size = page_size
        self._group_columns = group_columns
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
        return sum(_columns(members) for members in self._groups.values())

    def plan(self, batch: Batch) -> Plan:
        """The plan of the step for a batch. Raises OutOfMemory if a row needs pages that a failed step lost."""
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
        """The rows of the batch, without padding rows (those on page 0). Each row has a new resident, which is in no
        group yet."""
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

    def _write_for_readers(self, rows: list[Row], targets: Set[int], plan: Plan) -> None:
        """Plan writes to the pages that this step reads from the pool, if residents own newer positions of them."""
        pages: set[int] = set()
        for row in rows:
            if not row.resident.group:
                pages.update(row.resident.pages)
        pages -= targets
        pages.update(source for source, _ in plan.copies)
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
            del self._groups[resident.group]
            self._gather([resident], plan)

    def _new_pages(self, row: Row) -> list[int]:
        """The pages of the row whose earlier content the step overwrites."""
        return row.pages[len(row.resident.pages) if row.resident.group else row.start // self._page_size :]

    def _flush(self, residents: Iterable[Resident], plan: Plan) -> None:
        """Plan writes to the pool: all positions of these residents that the pool does not have yet."""
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

    def _fit(self, rows: list[Row], present: Set[Resident], plan: Plan) -> list[Row]:
        """The rows that have a group or fit into a new one. Idle groups are dropped to make room. Rows that still do
        not fit get temporary groups."""
        idle: list[int] = []
        used = 0
        for group, members in self._groups.items():
            staying = [resident for resident in members if resident in present]
            used += _columns(staying or members)
            if not staying:
                idle.append(group)
        fitting: list[Row] = []
        for row in rows:
            if row.resident.group:
                fitting.append(row)
                continue
            columns = _in_steps(row.end + 1)
            while idle and used + columns > self.room:
                used -= _columns(self._groups[idle[0]])
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
        make = Make(next(self._numbers), [Source(x.length, x.group, x.row, x.pages) for x in members])
        for position, resident in enumerate(members):
            resident.group = make.group
            resident.row = position
        return make

    def _advance(self, row: Row) -> None:
        """Record that the step computes the row: its resident gets the new positions and owns their pages."""
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
        """Record that the last planned step was not computed. The groups of its rows are dropped. Their positions
        that the pool does not have are lost."""
        for resident in self._current:
            self._groups.pop(resident.group, None)
            dirty = resident.pages[resident.synced // self._page_size :]
            self._lost.update(page for page in dirty if self._owners.get(page, resident) is resident)
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
        if resident.length < row.start:
            continue
        if resident.pages == head or resident.pages[: len(head)] == head:  # `==` without a slice copies nothing
            residents.remove(resident)
            return resident
    return row.resident


def _columns(members: list[Resident]) -> int:
    """The number of columns of a group, padding included."""
    return len(members) * _in_steps(max(resident.length for resident in members) + 1)


def _in_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP
