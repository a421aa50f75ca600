"""Plans a step: where the KV of each row of a batch lies, and which rows share a call of the model. Integers only.

A sequence that computes is resident: its KV lies in one row of a group, the cache of one call of the model. The pool
holds the pages that sequences share. A resident owns a page while only its group has the newest positions of it.

A row of a batch continues its resident, or takes over an idle one that begins as the row does, or reads its pages from
the pool, or begins empty. A resident writes its new positions to the pool before another row reads them, and when it
leaves its group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, NamedTuple

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


class Begin(NamedTuple):
    """Make a group of empty rows."""

    group: int
    rows: int


class Read(NamedTuple):
    """Make a group of one row from pages."""

    group: int
    pages: list[int]
    length: int


class Trim(NamedTuple):
    """Cut the one row of a group to its first positions."""

    group: int
    length: int


class Gather(NamedTuple):
    """Make a group of rows of other groups."""

    group: int
    sources: list[tuple[int, int]]  # group and row


Move = Begin | Read | Trim | Gather


class Call(NamedTuple):
    """Compute `new` tokens of each row of a group."""

    group: int
    rows: list[int]  # of the batch, in the order of the group's rows
    new: int


class Passing(NamedTuple):
    """A row without room for a group that stays: it is read, computed and written by itself."""

    move: Begin | Read
    call: Call
    write: Write


@dataclass(slots=True)
class Plan:
    """A step, in the order of these fields. Groups that `Planner.groups` does not name are dropped."""

    writes: list[Write] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages: source and target
    passing: list[Passing] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    @property
    def writes_pages(self) -> bool:
        return bool(self.writes or self.copies or self.passing)

    @property
    def sources(self) -> set[int]:
        """Groups whose rows others take."""
        return {group for move in self.moves if isinstance(move, Gather) for group, _ in move.sources}


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence whose KV lies in a row of a group."""

    group: int
    row: int
    pages: list[int]
    length: int
    synced: int  # first positions that the pool has
    step: int  # the last step that computed it


@dataclass(slots=True, eq=False)
class Row:
    """A row of a batch: positions start…end-1 of a sequence are to be computed."""

    index: int
    start: int
    end: int
    pages: list[int]  # of positions 0…end-1
    head: list[int]  # of positions 0…start-1

    @property
    def new(self) -> int:
        return self.end - self.start


class Planner:
    """Which sequences are resident, and what a batch changes in that."""

    def __init__(self, page_size: int, room: int, group_columns: int) -> None:
        """`room`: columns (positions) of all groups together. `group_columns`: padded columns that cost as much to read
        as one more call of the model."""
        self.room = room
        self._page_size = page_size
        self._group_columns = group_columns
        self._groups: dict[int, list[Resident]] = {}
        self._owners: dict[int, Resident] = {}  # by page
        self._lost: set[int] = set()  # pages whose content a failed step took
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
        """The step for a batch. Raises OutOfMemory where a row needs pages that a failed step lost."""
        self._current = []
        self._step += 1
        plan = Plan(copies=[(source, target) for source, target in batch.page_copies[0].tolist()])
        targets = {target for _, target in plan.copies}
        rows = self._rows(batch)
        residents = self._matches(rows, targets)
        readers = [row for row in rows if row not in residents]
        needed = {page for row in readers for page in row.head} - targets | {source for source, _ in plan.copies}
        if not self._lost.isdisjoint(needed):
            raise OutOfMemory("a step without memory lost pages that this step reads")
        self._flush(dict.fromkeys(self._owners[page] for page in sorted(needed & self._owners.keys())), plan)
        for row, resident in residents.items():
            self._trim(resident, row, plan)
        overwritten = targets | {page for row in rows for page in self._new_pages(row, residents.get(row))}
        self._lost -= overwritten
        present = set(residents.values())
        self._leave(present, overwritten, plan)
        passing = self._pass(readers, present, plan)
        self._place([row for row in rows if row not in passing], residents, plan)
        for row, resident in residents.items():
            resident.pages = row.pages
            resident.length = row.end
            resident.step = self._step
            self._owners.update(dict.fromkeys(row.pages[row.start // self._page_size :], resident))
            self._current.append(resident)
        return plan

    def _rows(self, batch: Batch) -> list[Row]:
        """Rows of the batch, without inert ones, which are on page 0."""
        starts = batch.positions[batch.row_starts[:-1]].tolist()
        ends = batch.context_lens.tolist()
        rows: list[Row] = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            pages = batch.page_tables[0][index, : self._pages(end)].tolist()
            if pages and pages[0]:
                rows.append(Row(index, start, end, pages, pages[: self._pages(start)]))
        return rows

    def _pages(self, length: int) -> int:
        """Pages of so many positions."""
        return -(-length // self._page_size)

    def _matches(self, rows: list[Row], targets: Set[int]) -> dict[Row, Resident]:
        """Two kinds of rows: those whose resident has exactly their pages and positions, and those whose prefix an idle
        resident has that is alone in its group. The pages of `targets` are about to change."""
        ends: dict[int, list[Resident]] = {}
        for resident in chain.from_iterable(self._groups.values()):
            ends.setdefault(resident.pages[-1], []).append(resident)
        continuing = [row for row in rows if row.start and row.head[-1] not in targets]
        matches: dict[Row, Resident] = {}
        for row in continuing:
            candidates = ends.get(row.head[-1], [])
            exact = [resident for resident in candidates if resident.length == row.start and resident.pages == row.head]
            if exact:
                candidates.remove(exact[0])
                matches[row] = exact[0]
        busy = set(matches.values())
        idle = [members[0] for members in self._groups.values() if len(members) == 1 and members[0] not in busy]
        for row in continuing:
            prefixed = [r for r in idle if r.length > row.start and r.pages[: len(row.head)] == row.head]
            if prefixed and row not in matches:
                idle.remove(prefixed[0])
                matches[row] = prefixed[0]
        return matches

    def _trim(self, resident: Resident, row: Row, plan: Plan) -> None:
        """Cut a resident to the positions of its row, and write the others before."""
        if resident.length > row.start:
            self._flush([resident], plan)
            plan.moves.append(Trim(resident.group, row.start))
            resident.length = row.start
            resident.synced = row.start
            resident.pages = row.head

    def _new_pages(self, row: Row, resident: Resident | None) -> list[int]:
        """Pages that hold something else after the step."""
        first = 0 if resident is None else len(resident.pages)
        return row.pages[max(row.start // self._page_size, first) :]

    def _flush(self, residents: Iterable[Resident], plan: Plan) -> None:
        """Write what only the groups of these residents have."""
        spans: dict[int, list[Span]] = {}
        for resident in residents:
            if resident.synced == resident.length:
                continue
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
        """Residents without a row leave a group at once that others continue in. A group without any row stays for a
        while, unless one of its pages is about to hold something else."""
        for group, members in list(self._groups.items()):
            absent = [resident for resident in members if resident not in present]
            if len(absent) < len(members):
                self._flush(absent, plan)
            elif self._step - members[0].step > PATIENCE or not all(
                overwritten.isdisjoint(resident.pages) for resident in members
            ):
                self._drop(group, plan)

    def _drop(self, group: int, plan: Plan) -> None:
        self._flush(self._groups.pop(group), plan)

    def _pass(self, readers: list[Row], present: Set[Resident], plan: Plan) -> set[Row]:
        """Rows for which there is no room. Idle groups give way before."""
        idle = [group for group, members in self._groups.items() if present.isdisjoint(members)]
        used = sum(_columns([r for r in members if r in present] or members) for members in self._groups.values())
        passing: set[Row] = set()
        for row in readers:
            columns = _in_steps(row.end + 1)
            while idle and used + columns > self.room:
                used -= _columns(self._groups[idle[0]])
                self._drop(idle.pop(0), plan)
            if used + columns <= self.room:
                used += columns
                continue
            group = next(self._numbers)
            move = Read(group, row.head, row.start) if row.start else Begin(group, 1)
            write = Write(group, [Span(0, row.end, row.start, row.pages)])
            plan.passing.append(Passing(move, Call(group, [row.index], row.new), write))
            self._current.append(Resident(group, 0, row.pages, row.end, row.start, self._step))
            passing.add(row)
        return passing

    def _place(self, rows: list[Row], residents: dict[Row, Resident], plan: Plan) -> None:
        """Group rows into calls, and make the groups that this needs."""
        parts: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            parts.setdefault(self._kind(row, residents.get(row)), []).append(row)
        sources: set[int] = set()
        for kind, part in parts.items():
            for together in self._joined(part) if kind[0] == "decode" else [part]:
                members = [residents[row] for row in together if row in residents]
                if not members:
                    group = self._begin(together, residents, plan)
                elif members == self._groups.get(members[0].group):
                    group = members[0].group
                else:
                    sources.update(resident.group for resident in members)
                    group = self._gather(members, plan)
                plan.calls.append(Call(group, [row.index for row in together], together[0].new))
        for group in sources:
            del self._groups[group]

    def _kind(self, row: Row, resident: Resident | None) -> tuple[Any, ...]:
        """Rows of one kind share a call. Rows that decode every second step do not join those that always do."""
        if resident is None:
            return ("begin", row.new) if row.start == 0 else ("read", row.index)
        if row.new == 1:
            return ("decode", resident.step == self._step - 1)
        return ("prefill", resident.group, row.new)

    def _joined(self, rows: list[Row]) -> list[list[Row]]:
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

    def _begin(self, rows: list[Row], residents: dict[Row, Resident], plan: Plan) -> int:
        """A new group of rows that begin empty, or of one that reads its pages."""
        group = next(self._numbers)
        head = rows[0].head
        plan.moves.append(Read(group, head, rows[0].start) if head else Begin(group, len(rows)))
        members = [Resident(group, at, row.head, row.start, row.start, 0) for at, row in enumerate(rows)]
        residents.update(zip(rows, members, strict=True))
        self._groups[group] = members
        return group

    def _gather(self, members: list[Resident], plan: Plan) -> int:
        """A new group of residents of others."""
        group = next(self._numbers)
        plan.moves.append(Gather(group, [(resident.group, resident.row) for resident in members]))
        for row, resident in enumerate(members):
            resident.group = group
            resident.row = row
        self._groups[group] = members
        return group

    def release_all(self) -> Plan:
        """Nothing computes: every resident leaves."""
        plan = Plan()
        for group in list(self._groups):
            self._drop(group, plan)
        self._current = []
        return plan

    def fail(self) -> None:
        """The step planned last was not computed: what only its rows' groups had is lost."""
        for resident in self._current:
            self._groups.pop(resident.group, None)
            dirty = resident.pages[resident.synced // self._page_size :]
            self._lost.update(page for page in dirty if self._owners.get(page, resident) is resident)
            self._disown(resident)
        self._current = []

    def fail_all(self) -> None:
        """What all groups had is lost."""
        self._lost.update(self._owners)
        self._owners.clear()
        self._groups.clear()
        self._current = []


def _columns(members: list[Resident]) -> int:
    """Columns of a group, padded ones too."""
    return len(members) * _in_steps(max(resident.length for resident in members) + 1)


def _in_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP
