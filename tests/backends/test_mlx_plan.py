"""The planner of MLX without MLX. A device executes plans with tokens in place of KV, and compares each row with the
expected cells of its pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from localllm.backends.mlx import plan as planning
from localllm.backends.mlx.plan import PATIENCE, STEP, Call, Make, Plan, Planner, Source, Span, Window, kept_columns
from localllm.engine.batch import Batch
from localllm.engine.engine import Engine
from localllm.engine.errors import OutOfMemory
from localllm.engine.request import Request, Sampling
from localllm.engine.runner import CacheGroup, StepResult

from ..engine.token_device import SPEC, TokenDevice, outputs, solo
from .batches import Row, make_batch

ALTERNATING = Sampling(frequency_penalty=0.5)  # with overlap such a row computes every second step
VOCAB = SPEC.vocab_size
ROOMY = 99 * STEP


@dataclass
class Cells:
    """The cells of a row: of all positions, and in the layers with a window of positions `first`…"""

    full: list[Any]
    window: list[Any] = field(default_factory=list)
    first: int = 0


@dataclass
class PlanDevice(TokenDevice):
    """Stores the expected cells after each step, and groups and a pool that only plans change."""

    room: int = ROOMY
    group_columns: int = 4096
    plans: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        pages, *windows = self.spec.groups
        self.size = pages.page_size
        self.window = windows[0].window if windows else 0
        window = Window(self.window, pages.num_pages, 0.5) if windows else None
        self.planner = Planner(self.size, self.room, self.group_columns, window)
        self.groups: dict[int, list[Cells]] = {}
        self.pools = [np.full_like(cells, -2) for cells in self.cells]

    def compute(self, batch: Batch) -> StepResult:
        answer = super().compute(batch)
        plan = self.planner.plan(batch)
        self.plans.append(plan)
        self.move(plan)
        self.keep({*self.planner.groups, *plan.sources})
        computed: list[int] = []
        for temporary in plan.temporary:
            self.make(temporary.make)
            computed += self.call(temporary.call, batch)
            self.write_pages(temporary.write.group, temporary.write.spans)
            del self.groups[temporary.call.group]
        for make in plan.makes:
            self.make(make)
        self.keep(self.planner.groups)
        for call in plan.calls:
            computed += self.call(call, batch)
        assert sorted(computed) == list(range(batch.num_rows)), "each row is computed once"
        assert self.groups.keys() == set(self.planner.groups)
        return answer

    def move(self, plan: Plan) -> None:
        for write in plan.writes:
            self.write_pages(write.group, write.spans)
        for pool, copies in zip(self.pools, (plan.copies, plan.window_copies), strict=False):
            if copies:
                sources, targets = np.array(copies).T
                pool[targets] = pool[sources]
        for group, columns in plan.drops:
            left = max(len(row.window) for row in self.groups[group]) - columns
            for row in self.groups[group]:
                row.first += max(0, len(row.window) - left)
                row.window = row.window[-left:]

    def keep(self, groups: Any) -> None:
        self.groups = {number: rows for number, rows in self.groups.items() if number in groups}

    def write_pages(self, group: int, spans: list[Span]) -> None:
        for span in spans:
            row = self.groups[group][span.row]
            assert len(row.full) == span.length > span.start
            for position in range(span.start, span.length):
                page, offset = divmod(position, self.size)
                self.pools[0][span.pages[page], offset] = row.full[position]
                if span.window_pages and span.window_pages[page]:
                    self.pools[1][span.window_pages[page], offset] = row.window[position - row.first]

    def make(self, make: Make) -> None:
        moved = [(source.group, source.row) for source in make.sources if source.group]
        assert len(set(moved)) == len(moved)
        self.groups[make.group] = [self.row(source) for source in make.sources]

    def row(self, source: Source) -> Cells:
        if not source.group:
            window = []
            if self.window:
                window = self.pools[1][source.window_pages].reshape(-1, 3)[source.first : source.length].tolist()
            full = self.pools[0][source.pages].reshape(-1, 3)[: source.length].tolist()
            return Cells(full, window, source.first)
        row = self.groups[source.group][source.row]
        assert len(row.full) == source.length or len(self.groups[source.group]) == 1, "only a group of one row is cut"
        return Cells(row.full[: source.length], row.window[: source.length - row.first], row.first)

    def call(self, call: Call, batch: Batch) -> list[int]:
        rows = self.groups[call.group]
        assert len(rows) == len(call.rows)
        for row, index in zip(rows, call.rows, strict=True):
            end = int(batch.context_lens[index])
            full, *windows = [
                cells[table[index]].reshape(-1, 3)[:end].tolist()
                for cells, table in zip(self.cells, batch.page_tables, strict=True)
            ]
            row.full += full[end - call.new :]
            assert row.full == full
            for window in windows:
                row.window += window[end - call.new :]
                read = max(0, end - call.new + 1 - self.window)
                assert row.first <= read
                assert row.window[read - row.first :] == window[read:]
                assert len(row.window) <= kept_columns(self.window) + call.new
        return call.rows


def requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Some share a prefix, some are equal, some compute every second step."""
    base = rng.integers(3, VOCAB, 60).tolist()
    created = []
    for number in range(count):
        text = [*base[: int(rng.integers(0, 60))], *rng.integers(3, VOCAB, int(rng.integers(1, 30))).tolist()]
        if created and rng.random() < 0.2:
            text = list(created[-1].prompt)
        sampling = ALTERNATING if rng.random() < 0.3 else Sampling()
        created.append(Request(f"r{number}", tuple(text), int(rng.integers(1, 40)), sampling))
    return created


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    ("room", "pages", "padding"), [(ROOMY, 128, 4096), (3 * STEP, 128, 4096), (0, 40, 9), (ROOMY, 50, 0)]
)
@pytest.mark.parametrize("seed", range(3))
def test_every_row_has_the_positions_of_its_pages(
    overlap: bool, room: int, pages: int, padding: int, seed: int
) -> None:
    spec = replace(SPEC, groups=(CacheGroup(4, pages),), overlap=overlap)
    device = PlanDevice(spec, room=room, group_columns=padding)
    check_traffic(device, seed)
    kinds = {origin(make) for plan in device.plans for make in plan.makes}
    assert kinds >= {"empty", "pages", "rows"} or room < ROOMY or not padding
    assert any(plan.temporary for plan in device.plans) == (room < ROOMY)


@pytest.mark.parametrize(
    ("room", "pages", "window", "window_pages", "overlap"),
    [
        (ROOMY, 128, 9, 40, False),
        (ROOMY, 60, 5, 16, True),
        (50, 128, 9, 30, True),
        (0, 60, 9, 20, True),
        (ROOMY, 128, 30, 60, True),
    ],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_every_row_has_its_window(
    room: int, pages: int, window: int, window_pages: int, overlap: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of the layers with a window have other rows again while rows that had them before still compute."""
    monkeypatch.setattr(planning, "STEP", 4)
    groups = CacheGroup(4, pages), CacheGroup(4, window_pages, window)
    device = PlanDevice(replace(SPEC, groups=groups, overlap=overlap, max_tokens=16), room=room)
    check_traffic(device, seed)
    assert any(plan.drops for plan in device.plans) == (room > 0)


def check_traffic(device: PlanDevice, seed: int) -> None:
    """Requests come, go and are cancelled: each gets the answer that it gets alone."""
    room = device.room
    engine, rng = Engine(device), np.random.default_rng(seed)
    waiting, deltas, ended = requests(rng, 24), list[Any](), set[str]()
    submitted = {request.id: request for request in waiting}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            engine.submit(waiting.pop())
        if rng.random() < 0.05 and engine.has_work:
            name = str(rng.choice(list(submitted)))
            engine.cancel(name)
            ended.add(name)
        if rng.random() < 0.02:
            device.move(device.planner.release_all())
            device.groups.clear()
        deltas += engine.step()
        if room:
            assert device.planner.columns <= max(room, 8 * STEP)
    for name, tokens in outputs(deltas).items():
        assert name in ended or tokens == solo(submitted[name], device.spec)
    device.planner.release_all()
    assert not device.planner._owners


def origin(make: Make) -> str:
    """Where the first row of a new group comes from."""
    first = make.sources[0]
    if first.group:
        return "rows"
    return "pages" if first.length else "empty"


def planned(planner: Planner, *rows: Row, copies: Any = ()) -> Plan:
    return planner.plan(make_batch(rows, VOCAB, copies))


@pytest.fixture
def planner() -> Planner:
    return Planner(4, ROOMY, 4096)


def text(length: int) -> list[int]:
    return [5] * length


def test_rows_that_continue_move_nothing(planner: Planner) -> None:
    planned(planner, Row(text(5), 0, [1, 2]), Row(text(5), 0, [3, 4]))
    for position in (5, 6, 7, 8):
        plan = planned(planner, Row([5], position, [1, 2, 5]), Row([5], position, [3, 4, 6]))
        assert (plan.writes, plan.makes) == ([], [])
        assert [call.rows for call in plan.calls] == [[0, 1]]


def test_next_turn_of_a_chat_takes_over(planner: Planner) -> None:
    """The positions of the turn before are written, so that other rows may read them."""
    planned(planner, Row(text(10), 0, [1, 2, 3]))
    plan = planned(planner, Row(text(9), 8, [1, 2, 4, 5, 6]))
    [make] = plan.makes
    [source] = make.sources
    assert (source.group, source.length) == (1, 8)
    assert [span.length for write in plan.writes for span in write.spans] == [10]
    assert len(planner.groups) == 1


def test_row_with_a_shared_prefix_reads_its_pages(planner: Planner) -> None:
    planned(planner, Row(text(10), 0, [1, 2, 3]))
    plan = planned(planner, Row([5], 10, [1, 2, 3]), Row(text(9), 8, [1, 2, 4, 5, 6]))
    [make] = plan.makes
    assert make.sources == [Source(8, 0, 0, [1, 2], [], 0)]
    assert len(plan.writes) == 1


def test_leaving_row_is_written_and_the_others_are_gathered(planner: Planner) -> None:
    planned(planner, Row(text(5), 0, [1, 2]), Row(text(5), 0, [3, 4]))
    plan = planned(planner, Row([5], 5, [3, 4]))
    assert [[span.pages for span in write.spans] for write in plan.writes] == [[[1, 2]]]
    [make] = plan.makes
    assert [(source.group, source.row) for source in make.sources] == [(1, 1)]


def test_group_without_rows_stays_for_some_steps(planner: Planner) -> None:
    planned(planner, Row(text(5), 0, [1, 2]))
    for step in range(PATIENCE + 1):
        plan = planned(planner, Row([5], step, [9, 10, 11]))
        assert bool(plan.writes) == (step == PATIENCE)
    assert len(planner.groups) == 1


def test_rows_that_compute_every_second_step_do_not_join_the_others(planner: Planner) -> None:
    always, second, third = ([1, 2, 3], [4, 5, 6], [7, 8, 9])
    planned(planner, *(Row(text(2), 0, pages) for pages in (always, second)))
    planned(planner, Row(text(3), 0, third), Row([5], 2, always))
    plan = planned(planner, Row([5], 3, always), Row([5], 2, second))
    assert [call.rows for call in plan.calls] == [[1], [0]] or [call.rows for call in plan.calls] == [[0], [1]]
    plan = planned(planner, Row([5], 4, always), Row([5], 3, third))
    assert len(plan.calls) == 2


@pytest.mark.parametrize(("padding", "calls"), [(0, 3), (30, 2), (107, 1)])
def test_rows_share_a_call_up_to_the_cost_of_padding(padding: int, calls: int) -> None:
    planner = Planner(4, ROOMY, padding)
    lengths = [3, 10, 60]
    pages = [list(range(1 + 20 * index, 21 + 20 * index)) for index in range(3)]
    planned(planner, *(Row(text(length), 0, row_pages) for length, row_pages in zip(lengths, pages, strict=True)))
    plan = planned(planner, *(Row([5], length, row_pages) for length, row_pages in zip(lengths, pages, strict=True)))
    assert len(plan.calls) == calls
    assert sorted(row for call in plan.calls for row in call.rows) == [0, 1, 2]


def test_idle_groups_leave_before_a_temporary_group() -> None:
    planner = Planner(4, STEP, 4096)
    assert not planned(planner, Row(text(5), 0, [1, 2])).temporary
    plan = planned(planner, Row(text(5), 0, [3, 4]))
    assert not plan.temporary
    assert len(plan.writes) == len(planner.groups) == 1
    plan = planned(planner, Row([5], 5, [3, 4]), Row([5], 5, [1, 2]))
    [temporary] = plan.temporary
    assert temporary.call.rows == [1]
    assert temporary.write.spans[0].start == 5


def test_idle_row_leaves_when_its_page_is_overwritten(planner: Planner) -> None:
    """The row continues later from its pages, and not from the group of the row that has its page now."""
    planned(planner, Row(text(5), 0, [1, 2]))
    plan = planned(planner, Row([5], 5, [1, 2]), Row(text(4), 0, [7]))
    planned(planner, Row(text(3), 0, [2]))
    plan = planned(planner, Row([5], 6, [1, 2]))
    assert [origin(make) for make in plan.makes] == ["pages"]


def test_row_reads_a_page_that_a_copy_replaced(planner: Planner) -> None:
    planned(planner, Row(text(6), 0, [1, 2]))
    plan = planned(planner, Row([5], 6, [1, 2]), copies=[(3, 2)])
    assert [origin(make) for make in plan.makes] == ["pages"]
    assert plan.copies == [[3, 2]]


def test_pages_of_a_failed_step_are_lost_until_they_are_computed_again(planner: Planner) -> None:
    planned(planner, Row(text(9), 0, [4, 5, 6]))
    planned(planner, Row(text(9), 0, [1, 2, 3]), Row(text(4), 9, [4, 5, 6, 7]))
    planner.fail()
    assert not planner.groups
    for pages in ([1, 2, 8], [4, 5, 8]):
        with pytest.raises(OutOfMemory, match="lost pages"):
            planned(planner, Row([5], 8, pages))
    with pytest.raises(OutOfMemory, match="lost pages"):
        planned(planner, Row([5], 6, [9, 8]), copies=[(2, 8)])
    planned(planner, Row(text(8), 0, [1, 2]))
    planned(planner, Row([5], 8, [1, 2, 8]), Row([5], 8, [1, 2, 9]))


def test_failed_step_keeps_pages_of_other_rows(planner: Planner) -> None:
    planned(planner, Row(text(8), 0, [1, 2]))
    planned(planner, Row(text(4), 8, [1, 2, 3]), Row(text(4), 8, [1, 2, 4]))
    planner.fail()
    plan = planned(planner, Row([5], 8, [1, 2, 5]))
    assert [origin(make) for make in plan.makes] == ["pages"]
    planner.fail_all()
    assert not planner.groups
