"""The runner of MLX: prefix hits and the pages after them, groups, out of memory, and the memory of an idle runner."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from localllm.backends import mlx
from localllm.backends.mlx import runner as mlx_runner
from localllm.backends.mlx.cache import Caches, Pool
from localllm.backends.mlx.plan import STEP, Planner
from localllm.backends.mlx.runner import MlxPending
from localllm.engine.batch import Want
from localllm.engine.errors import OutOfMemory, RunnerFailed
from localllm.engine.files.model_files import read_model
from localllm.engine.request import Sampling
from localllm.engine.runner import CacheGroup, Runner

from ..waiting import wait_until
from .batches import Row, make_batch
from .conformance import Conversation, Planned
from .mlx_models import DENSE, SAME_BITS, SLIDING, SMALL, Loaded, no_memory, plain_model
from .test_mlx_families import Forced, near

pytestmark = pytest.mark.real_otherdevice

PAGE = SMALL.page_size
CLOSE = 1e-4 if SAME_BITS else 0.02  # CUDA's products take fewer bits of their factors
# A row with a penalty needs each token before the next one: with overlap it computes every second step.
IN_TURN = Sampling(frequency_penalty=1e-12)


@pytest.fixture(scope="module", params=[DENSE, SLIDING], ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.label)
    request.param.save(folder)
    return Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))


@pytest.fixture(params=["in-turn", "overlapped"])
def planned(loaded: Loaded, request: pytest.FixtureRequest) -> Planned:
    return Planned(loaded.runner, overlap=request.param == "overlapped")


def as_is(thing: Any) -> Any:
    """Untyped, to reach private attributes."""
    return thing


def planner_of(runner: Runner) -> Planner:
    actual: Planner = as_is(runner)._planner
    return actual


def caches_of(runner: Runner) -> Caches:
    actual: Caches = as_is(runner)._caches
    return actual


def release(runner: Runner) -> None:
    as_is(runner)._release()


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of calls of each method of the pool."""
    counts = dict.fromkeys(("read", "write", "copy"), 0)

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(Pool, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    for name in counts:
        monkeypatch.setattr(Pool, name, counted(name))
    return counts


def check_pages(loaded: Loaded, talk: Conversation, texts: list[list[int]]) -> int:
    """Compare the pages of these texts in the prefix tree with mlx-lm's cache; returns the number of pages."""
    runner, cache = as_is(loaded.runner), as_is(talk.engine._scheduler._cache)
    release(runner)
    tree, pool, count = cache._tree, caches_of(runner).pool, 0
    for text in texts:
        pages = [node.pages[0][0] for node in tree.match(tree.root(None), text, 0, len(text))]
        count += len(pages)
        if not pages:
            continue
        expected = [KVCache() for _ in pool.keys]
        mx.eval(loaded.model(mx.array([text[: len(pages) * PAGE]]), cache=expected))
        columns = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()
        for layer, cache in enumerate(expected):
            if any(shape.window for shape in runner._loaded.shapes[: layer + 1]):
                break  # mlx-lm's cache has no windows here, so later layers differ
            for stored, computed in ((pool.keys[layer], cache.keys), (pool.values[layer], cache.values)):
                actual = np.array(stored)[:, :, columns]
                np.testing.assert_allclose(actual, np.array(computed)[:, :, : len(columns)], atol=CLOSE)
    return count


def test_next_turn_of_a_chat_takes_over_its_group(loaded: Loaded, planned: Planned, calls: dict[str, int]) -> None:
    """Each turn writes the new positions of the turn before to the pool, and no turn reads the pool."""
    release(loaded.runner)
    talk, text = Conversation(planned), tokens(2, 21)
    for turn in range(5):
        talk.submit(str(turn), text, 7)
        talk.finish()
        assert talk.tokens[str(turn)] == loaded.plain(text, 7)
        assert talk.cached[str(turn)] == (0 if turn == 0 else (len(text) - 3) // PAGE * PAGE)
        text = [*text, *talk.tokens[str(turn)], 50 + turn, 60 + turn]
        assert list(caches_of(loaded.runner).groups) == list(planner_of(loaded.runner).groups)
    assert calls == {"read": 0, "write": 4, "copy": 0}
    assert check_pages(loaded, talk, [text]) == (len(text) - 3) // PAGE


@pytest.mark.parametrize("sampling", [Sampling(), IN_TURN], ids=["present", "sits out"])
def test_running_row_stays_right_while_others_share_its_prefix(
    loaded: Loaded, planned: Planned, sampling: Sampling
) -> None:
    """Later requests share a prefix of its prompt or of its answer; some of them join in the same step."""
    talk, first = Conversation(planned), tokens(3, 30)
    talk.submit("first", first, 60, sampling)
    while len(talk.tokens["first"]) < 21:
        talk.step()
    prompts = {"first": first}
    for name, length in (("a", 24), ("b", 24), ("c", 40), ("d", 48)):
        prompts[name] = [*first, *talk.tokens["first"]][:length] + tokens(ord(name), 5)
        talk.submit(name, prompts[name], 30, sampling if name == "c" else None)
        if name in "bc":
            talk.step()
    talk.finish()
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, len(talk.tokens[name])), name
    assert [talk.cached[name] for name in "abcd"] == [24, 24, 40, 48]
    texts = [[*prompt, *talk.tokens[name]] for name, prompt in prompts.items()]
    assert check_pages(loaded, talk, texts) > 30


@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_prefix_hits_of_chunked_prompts_equal_mlx_lm(loaded: Loaded, planned: Planned, chunk: int) -> None:
    planned.spec = replace(planned.spec, max_tokens=chunk)
    talk, first = Conversation(planned), tokens(4, 50)
    talk.submit("first", first, 10)
    talk.finish()
    prompts = {"a": first[:40] + tokens(5, 37), "b": first[:43] + tokens(6, 21), "c": first + tokens(7, 30)}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 12)
    talk.finish()
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, 12), name
    assert (talk.cached["a"], talk.cached["b"]) == (40, 43)
    assert check_pages(loaded, talk, list(prompts.values())) == sum(len(prompt) // PAGE for prompt in prompts.values())


@pytest.mark.parametrize(
    ("pages", "room_steps"),
    [
        pytest.param(17, 9, marks=pytest.mark.slow),
        (17, 2),
        pytest.param(40, 2, marks=pytest.mark.slow),
        pytest.param(400, 9, marks=pytest.mark.slow),
        pytest.param(400, 0, marks=pytest.mark.slow),
    ],
)
def test_many_requests_with_shared_prefixes_equal_mlx_lm(
    loaded: Loaded, planned: Planned, monkeypatch: pytest.MonkeyPatch, pages: int, room_steps: int
) -> None:
    """Requests join, leave, are cancelled, are preempted and come back. Now and then the runner is idle."""
    rng = np.random.default_rng(pages + room_steps)
    planned.spec = replace(planned.spec, groups=(CacheGroup(PAGE, pages),), max_tokens=40)
    monkeypatch.setattr(planner_of(loaded.runner), "room", room_steps * STEP)
    talk, texts, prompts = Conversation(planned), [tokens(room_steps, 20)], dict[str, list[int]]()
    while len(prompts) < 20 or talk.engine.has_work:
        if len(prompts) < 20 and rng.random() < 0.3:
            name, base = str(len(prompts)), texts[int(rng.integers(len(texts)))]
            prefix = base[: int(rng.integers(1, 100))]
            prompts[name] = [*prefix, *rng.integers(3, 131, int(rng.integers(1, 12))).tolist()]
            limit = min(pages * PAGE, 128) - len(prompts[name])
            sampling = IN_TURN if rng.random() < 0.3 else None
            talk.submit(name, prompts[name], int(rng.integers(1, min(limit, 40))), sampling)
        if rng.random() < 0.04 and prompts:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        if rng.random() < 0.03:
            release(loaded.runner)
        talk.step()
        texts = [[*prompt, *talk.tokens[name]] for name, prompt in prompts.items()] or texts
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, len(talk.tokens[name])), name
    assert sum(cached > 0 for cached in talk.cached.values()) > 8
    assert pages > 17 or talk.engine.stats().preemptions > 0
    assert check_pages(loaded, talk, texts) > 8


def test_out_of_memory_ends_only_the_rows_of_its_step(
    loaded: Loaded, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request joins with the prefix of a row that is not in the step, and the step fails: that row continues."""
    talk, first, original = Conversation(planned), tokens(8, 30), mx.async_eval
    talk.submit("first", first, 40, IN_TURN)
    while len(talk.tokens["first"]) < 4:
        talk.step()

    talk.submit("begins alike", [*first, 5], 9)
    if planned.spec.overlap:  # so that the first row is not in the failed step
        while not talk.engine._scheduler._launched:
            talk.step()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", original)
    survived = talk.finishes.get("first") is None
    if survived:
        release(loaded.runner)
    talk.finish()
    assert talk.finishes["begins alike"] == "no_memory"
    assert survived == planned.spec.overlap
    assert talk.tokens["first"] == loaded.plain(first, len(talk.tokens["first"]))
    assert not survived or len(talk.tokens["first"]) == 40


@pytest.mark.parametrize("room_steps", [1, 9])
def test_out_of_memory_keeps_a_row_that_left_its_group(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, room_steps: int
) -> None:
    """A row without a part in the failed step wrote its pages to the pool to make room."""
    text, runner, original = tokens(13, 16), loaded.runner, mx.async_eval
    release(runner)
    monkeypatch.setattr(planner_of(runner), "room", room_steps * STEP)

    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131))
    monkeypatch.setattr(mx, "async_eval", original)
    after = runner.run(make_batch([Row([9], 16, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9], 1)


@pytest.mark.parametrize("room_steps", [2, 9], ids=["left", "stays"])
def test_out_of_memory_keeps_pages_shared_with_an_absent_row(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, room_steps: int
) -> None:
    """The failed step continues a row that shares a prefix with a row outside the step. That row left its group."""
    text, runner, original = tokens(17, 16), loaded.runner, mx.async_eval
    release(runner)
    monkeypatch.setattr(planner_of(runner), "room", room_steps * STEP)
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131)).result()
    runner.run(make_batch([Row([9], 16, [1, 2, 4]), Row([9], 10, [1, 3])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([9], 11, [1, 3]), Row([5], 0, [6])], 131))
    monkeypatch.setattr(mx, "async_eval", original)
    after = runner.run(make_batch([Row([9], 17, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9, 9], 1)


@pytest.mark.parametrize("late", [False, True], ids=["freed at once", "freed late"])
def test_temporary_groups_do_not_copy_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """No layer is copied. `late`: as on a GPU, whose steps free the arrays that they read a little after their end."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**28))  # large beside the arrays of a step
    read = list[mx.array]()
    for number, pages in enumerate(([1, 2], [3, 4])):
        runner.run(make_batch([Row(tokens(number, 16), 0, pages)], 131)).result()
    release(runner)
    planner_of(runner).room = STEP
    original_read, original_synchronize = Pool.read, mx.synchronize

    def reads(pool: Pool, *args: Any) -> Any:
        read.extend(x[..., :1, :] for x in [*pool.keys, *pool.values])
        mx.eval(read)
        return original_read(pool, *args)

    def synchronize(*args: Any) -> None:
        original_synchronize(*args)
        read.clear()

    if late:
        monkeypatch.setattr(Pool, "read", reads)
        monkeypatch.setattr(mx, "synchronize", synchronize)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.run(make_batch([Row([7, 8], 16, [1, 2, 5]), Row([7, 8], 16, [3, 4, 6])], 131)).result()
    assert mx.get_peak_memory() - before < caches_of(runner).pool.keys[0].nbytes


def test_chunk_without_an_answer_does_not_copy_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk ends late, and the next step writes pages first."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**27))
    pool = caches_of(runner).pool
    runner.run(make_batch([Row(tokens(0, 16), 0, [1, 2])], 131)).result()
    release(runner)
    pair = [Row(tokens(1, 16), 0, [3, 4]), Row(tokens(2, 16), 0, [5, 6])]  # one group
    runner.run(make_batch(pair, 131)).result()

    def ends_late(args: list[mx.array]) -> None:
        original(args[:-1])
        original(big @ big)
        original(args[-1])

    big, original = mx.random.normal((1500, 1500)), mx.async_eval
    mx.eval(big)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", ends_late)
        runner.run(make_batch([Row([7, 8], 16, [1, 2, 7], Want.NOTHING)], 131))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        patch.setattr(mx, "async_eval", original)
        runner.run(make_batch([Row([9], 0, [4])], 131)).result()
    assert mx.get_peak_memory() - before < sum(x.nbytes for x in [*pool.keys, *pool.values]) / 16


def test_idle_groups_are_freed_before_a_temporary_group(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded.runner
    release(runner)
    monkeypatch.setattr(planner_of(runner), "room", 99 * STEP)
    rows = [Row(tokens(number, 40), 0, list(range(1 + 6 * number, 6 + 6 * number))) for number in range(8)]
    runner.run(make_batch(rows, 131)).result()
    [group] = caches_of(runner).groups.values()
    size, original, in_use = sum(x.nbytes for x in group.arrays), as_is(runner)._compute_now, list[int]()
    del group

    def passing(*args: Any) -> Any:
        output = original(*args)
        mx.clear_cache()
        in_use.append(mx.get_active_memory())
        return output

    mx.clear_cache()
    before = mx.get_active_memory()
    monkeypatch.setattr(runner, "_compute_now", passing)
    monkeypatch.setattr(planner_of(runner), "room", 0)
    runner.run(make_batch([Row([7, 7, 7], 8, [1, 50])], 131)).result()
    assert len(in_use) == 1
    assert in_use[0] < before - size / 2


@pytest.mark.parametrize(("room_steps", "waits"), [(99, 0), (0, 3)], ids=["room for all", "none"])
def test_only_temporary_groups_are_waited_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, room_steps: int, waits: int
) -> None:
    """A step whose rows are in groups is started without a wait. The runner waits for each temporary group, and for the
    step before the first."""
    runner, original, waits_seen = loaded.runner, mx.synchronize, list[Any]()

    def synchronize(*args: Any) -> None:
        waits_seen.append(args)
        original(*args)

    release(runner)
    monkeypatch.setattr(planner_of(runner), "room", room_steps * STEP)
    monkeypatch.setattr(mx, "synchronize", synchronize)
    pending = runner.run(make_batch([Row(tokens(17, 9), 0, [1, 2]), Row(tokens(18, 5), 0, [3])], 131))
    assert len(waits_seen) == waits
    pending.result()


def test_row_continues_with_equal_pages_of_another_row(loaded: Loaded) -> None:
    """The engine replaced the pages of the row by equal ones. The last positions of the last page are only in the
    group of the row."""
    text, runner = tokens(10, 20), loaded.runner
    runner.run(make_batch([Row(text[:16], 0, [1, 2])], 131)).result()
    runner.run(make_batch([Row(text, 0, [4, 5, 6])], 131)).result()
    after = runner.run(make_batch([Row([7, 8, 9], 20, [1, 2, 6])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 7, 8, 9], 1)


def test_pages_of_a_failed_step_are_not_read(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed step dropped the group that had them."""
    text, runner = tokens(13, 16), loaded.runner

    original = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row(text, 0, [1, 2])], 131))
    monkeypatch.setattr(mx, "async_eval", original)
    with pytest.raises(OutOfMemory, match="lost pages"):
        runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131))
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    after = runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 7], 1)


@pytest.mark.parametrize("room_steps", [0, 9])
def test_page_is_copied_before_a_row_overwrites_it(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, room_steps: int
) -> None:
    """The overwriting row comes first in the same step. Without room it even ends before the reader begins."""
    monkeypatch.setattr(planner_of(loaded.runner), "room", room_steps * STEP)
    text, other, runner = tokens(11, 16), tokens(12, 8), loaded.runner
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    release(runner)
    rows = [Row(other, 0, [2]), Row([7, 8, 9], 12, [1, 5])]
    after = runner.run(make_batch(rows, 131, [(2, 5)])).result()
    assert after.tokens.tolist() == [*loaded.plain(other, 1), *loaded.plain([*text[:12], 7, 8, 9], 1)]


def test_windows_are_right_after_a_prefix_hit(tmp_path: Path) -> None:
    """The cached prefix is longer than the window. The test compares log-probabilities: a random model chooses the same
    tokens with any window."""
    forced, first = Forced(SLIDING, tmp_path), tokens(9, 64)
    pages, shared = forced.pages(64), 0
    near(forced.step(Row(first, 0, pages)), forced.expected(first)[-1:])
    for text in ([*first[:56], *tokens(10, 8)], [*first[:16], *tokens(11, 30)]):
        shared, expected = 56 if shared == 0 else 16, forced.expected(text)
        row_pages = [*pages[: shared // PAGE], *forced.pages(len(text) - shared)]
        for start, end in pairwise([shared, shared + 3, *range(shared + 4, len(text) + 1)]):
            near(forced.step(Row(text[start:end], start, row_pages)), expected[end - 1 : end])


def test_joined_rows_are_in_the_order_of_the_batch(loaded: Loaded) -> None:
    """With this order, the next step gathers neither tokens nor logits."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(2)
    prompts = {name: rng.integers(3, 131, 20).tolist() for name in "abcde"}
    for names in ("ab", "cd", "e"):
        for name in names:
            talk.submit(name, prompts[name], 30)
        talk.step()
        talk.step()
    for _ in range(6):
        talk.step()
    assert len(planner_of(loaded.runner).groups) == 1
    assert [r.row for r in as_is(planner_of(loaded.runner))._current] == [0, 1, 2, 3, 4]
    assert talk.finish() == {name: loaded.plain(prompt, 30) for name, prompt in prompts.items()}


def test_shared_prefix_stays_within_the_room_of_groups(tmp_path: Path) -> None:
    """The pool has the prefix once, so the engine admits all requests. Groups would have a copy for each."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**20, max_rows=12))
    plain = Loaded(runner, plain_model(tmp_path))
    shared = np.random.default_rng(0).integers(3, 131, 64).tolist()
    talk = Conversation(runner)
    talk.submit("first", shared, 1)
    talk.finish()
    for index in range(12):
        talk.submit(str(index), [*shared, index + 3], 20)
    columns = 0
    while talk.engine.has_work:
        talk.step()
        columns = max(columns, planner_of(runner).columns)
    assert columns <= planner_of(runner).room
    assert talk.engine.stats().preemptions == 0
    for index in range(12):
        assert talk.tokens[str(index)] == plain.plain([*shared, index + 3], 20)


def test_idle_runner_frees_groups_and_the_cache_of_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.backends.mlx.runner.IDLE", 0.2)
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), SMALL)
    expected = Loaded(runner, plain_model(tmp_path)).plain([5] * 100, 20)
    talk = Conversation(runner)
    for name in "abc":  # the second and third read pages of the first, whose group is freed
        talk.submit(name, [5] * 100, 20)
        talk.finish()
        busy = mx.get_cache_memory() and planner_of(runner).columns
        wait_until(lambda: not mx.get_cache_memory() and not planner_of(runner).columns)
        assert busy > 0 == mx.get_cache_memory() == planner_of(runner).columns
        assert talk.tokens[name] == expected
    assert talk.cached["c"] >= 96


def test_idle_timer_waits_for_an_unread_step(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take longer than the idle time."""
    runner: Any = loaded.runner
    ahead, columns_in_use = Planned(loaded.runner, overlap=True), list[int]()
    monkeypatch.setattr(runner._idle_timer, "_seconds", 0.05)
    original = MlxPending.result

    def slow(pending: MlxPending) -> Any:
        time.sleep(0.12)
        columns_in_use.append(planner_of(runner).columns)
        return original(pending)

    monkeypatch.setattr(MlxPending, "result", slow)
    talk = Conversation(ahead)
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    assert min(columns_in_use) > 0
    assert talk.tokens["a"] == loaded.plain([5] * 30, 4)
    wait_until(lambda: planner_of(runner).columns == 0)


def test_prompts_of_equal_length_share_a_call(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = loaded.runner
    shapes, original = list[tuple[int, ...]](), runner._loaded.forward

    def forward(tokens: mx.array, caches: list[Any]) -> Any:
        shapes.append(tokens.shape)
        return original(tokens, caches)

    monkeypatch.setattr(runner, "_loaded", replace(runner._loaded, forward=forward))
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(3)
    lengths = {"a": 17, "b": 5, "c": 32, "d": 40, "e": 30, "f": 1, "g": 32}
    prompts = {name: rng.integers(3, 131, length).tolist() for name, length in lengths.items()}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 9)
    talk.step()
    assert shapes == [(1, 17), (1, 5), (2, 32), (1, 40), (1, 30), (1, 1)]
    talk.finish()
    assert talk.tokens == {name: loaded.plain(prompt, 9) for name, prompt in prompts.items()}


def test_cancelled_requests_free_their_memory(loaded: Loaded) -> None:
    """Requests are cancelled while a step planned ahead is in flight; the memory in use does not grow."""
    talk = Conversation(Planned(loaded.runner, overlap=True))

    def churn(turn: int) -> None:
        rng = np.random.default_rng(turn)
        for number in range(6):
            talk.submit(f"{turn}-{number}", rng.integers(3, 131, int(rng.integers(20, 60))).tolist(), 30)
        for _ in range(8):
            talk.step()
        for number in range(6):
            talk.engine.cancel(f"{turn}-{number}")
        while talk.engine.has_work:
            talk.step()

    def memory() -> int:
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    churn(0)
    churn(1)
    before = memory()
    for turn in range(2, 6):
        churn(turn)
    assert memory() <= before + 2**20


def check_requests_after_out_of_memory(loaded: Loaded, talk: Conversation, prompts: dict[str, list[int]]) -> None:
    """Requests a, b and c ended, with right tokens until then. Two more requests get all of their tokens."""
    for name, prompt in (("d", "c"), ("e", "a")):
        talk.submit(name, prompts[prompt], 12)
    talk.finish()
    ends = {name: talk.finishes[name] for name in "abcde"}
    assert ends == {"a": "no_memory", "b": "no_memory", "c": "no_memory", "d": "length", "e": "length"}
    for name, prompt in (("a", "a"), ("b", "b"), ("d", "c"), ("e", "a")):
        assert talk.tokens[name] == loaded.plain(prompts[prompt], len(talk.tokens[name]))
    assert len(talk.tokens["d"]) == len(talk.tokens["e"]) == 12


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("cached", [0, 24], ids=["new", "goes-on"])
@pytest.mark.parametrize("room", [True, False], ids=["in-groups", "passing"])
def test_failed_allocation_ends_the_requests_of_its_step(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, cached: int, room: bool
) -> None:
    """MLX's allocator refuses. No request reads a page that the step should have written."""
    if not room:
        monkeypatch.setattr(planner_of(loaded.runner), "room", 0)
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(5)
    prefix = rng.integers(3, 131, cached).tolist()
    prompts = {name: [*prefix, *rng.integers(3, 131, 30).tolist()] for name in "abc"}
    if cached:
        talk.submit("first", [*prefix, 5], 4)
        talk.finish()
    for name in "ab":
        talk.submit(name, prompts[name], 12)
    for _ in range(4):
        talk.step()
    original = mx.async_eval

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.submit("c", prompts["c"], 12)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", original)
    check_requests_after_out_of_memory(loaded, talk, prompts)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("writing", [False, True], ids=["caches", "pages"])
def test_out_of_memory_at_the_result_ends_requests_or_the_runner(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, writing: bool
) -> None:
    """Metal refuses a command buffer. If the step wrote pages that other requests may read, the runner ends."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(11)
    prompts = {name: rng.integers(3, 131, 30).tolist() for name in "abc"}
    for name, count in (("a", 30), ("b", 30), ("c", 3 if writing else 30)):
        talk.submit(name, prompts[name], count)
    while len(talk.tokens["c"]) < 3:
        talk.step()
    while writing and not loaded.runner._wrote_pages[0]:  # type: ignore[attr-defined]
        talk.step()  # c has ended, and its pages are written

    def full(*_: object) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    monkeypatch.setattr(mlx_runner, "_values", full)
    if writing:
        with pytest.raises(RunnerFailed, match="while pages were written"):
            talk.step()
        return
    talk.step()
    monkeypatch.undo()
    check_requests_after_out_of_memory(loaded, talk, prompts)


def test_out_of_memory_before_pages_are_written_ends_the_runner(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step should write pages from results of the step before, and both are lost."""
    talk, rng, runner = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(12), loaded.runner
    for name, count in (("a", 30), ("b", 30), ("c", 3)):
        talk.submit(name, rng.integers(3, 131, 30).tolist(), count)
    original = as_is(runner)._compute

    def full(*_: object) -> Any:
        raise OutOfMemory("full")

    def compute(*args: Any) -> Any:
        if talk.tokens["a"] and as_is(runner)._wrote_pages[0]:  # c left its group in this step
            monkeypatch.setattr(mlx_runner, "_values", full)
            full()
        return original(*args)

    monkeypatch.setattr(runner, "_compute", compute)
    with pytest.raises(RunnerFailed, match="while pages were written"):
        talk.finish()


def bytes_in_use(loaded: Loaded, base: int) -> int:
    """Bytes of arrays above `base`, with arrays in cycles of Python."""
    mx.synchronize(loaded.runner._stream)  # type: ignore[attr-defined]
    return mx.get_active_memory() - base


@pytest.fixture
def at_rest(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes in use of an idle runner. The garbage collector is off: a worker rarely collects its oldest generation."""
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("warm", [5] * 4, 2)
    talk.finish()
    monkeypatch.setattr(runner._idle_timer, "_seconds", 600)
    release(runner)
    gc.collect()
    gc.disable()
    yield bytes_in_use(loaded, 0)
    gc.enable()


def test_idle_runner_frees_groups_without_garbage_collection(loaded: Loaded, at_rest: int) -> None:
    talk = Conversation(Planned(loaded.runner, overlap=False))
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    talk.finish()
    assert bytes_in_use(loaded, at_rest) > 2**19
    release(loaded.runner)
    assert bytes_in_use(loaded, at_rest) < 2**14


def test_out_of_memory_frees_groups_without_garbage_collection(
    loaded: Loaded, at_rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, original = Conversation(Planned(loaded.runner, overlap=False)), mx.async_eval
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    for _ in range(10):
        talk.step()
    assert bytes_in_use(loaded, at_rest) > 2**19

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", original)
    assert set(talk.finishes.values()) == {"no_memory"}
    assert bytes_in_use(loaded, at_rest) < 2**14


def test_next_step_computes_writes_that_failed_when_idle(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        release(runner)
    assert runner._caches.pool.changed
    talk.submit("b", [5] * 30, 4)
    talk.finish()
    assert talk.tokens["b"] == talk.tokens["a"] == loaded.plain([5] * 30, 4)


class FakeTimer:
    """threading.Timer with the clock of a test."""

    now = 0.0
    running: ClassVar[list[FakeTimer]] = []

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.due, self.function = FakeTimer.now + seconds, function

    def start(self) -> None:
        FakeTimer.running.append(self)

    def cancel(self) -> None:
        FakeTimer.running.remove(self)

    @classmethod
    def advance(cls, seconds: float) -> None:
        """Move the clock, and make the calls that are due."""
        cls.now += seconds
        for timer in [timer for timer in cls.running if timer.due <= cls.now]:
            cls.running.remove(timer)
            timer.function()


@pytest.fixture
def fake_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeTimer.now, FakeTimer.running = 0.0, []
    monkeypatch.setattr(mlx_runner.threading, "Timer", FakeTimer)
    monkeypatch.setattr(mlx_runner.time, "monotonic", lambda: FakeTimer.now)


class Idle:
    """Counts the calls of an idle timer."""

    def __init__(self) -> None:
        self.calls = 0
        self.timer = mlx_runner._IdleTimer(0.6, self.call)

    def call(self) -> None:
        self.calls += 1


def test_idle_timer_calls_once_after_the_last_restart(fake_timers: None) -> None:
    idle = Idle()
    for _ in range(8):
        idle.timer.restart()
        FakeTimer.advance(0.5)
        assert idle.calls == 0
    FakeTimer.advance(0.2)
    assert (idle.calls, FakeTimer.running) == (1, [])
    idle.timer.restart()
    FakeTimer.advance(0.7)
    assert idle.calls == 2


def test_cancelled_idle_timer_does_not_call(fake_timers: None) -> None:
    idle = Idle()
    idle.timer.restart()
    idle.timer.cancel()
    idle.timer.restart()
    FakeTimer.advance(100.0)
    assert idle.calls == 0


def test_idle_timer_does_not_keep_its_object(fake_timers: None) -> None:
    idle = Idle()
    idle.timer.restart()
    reference = weakref.ref(idle)
    del idle
    assert reference() is None


def test_release_after_close_does_nothing(tmp_path: Path) -> None:
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), SMALL)
    pending = runner.run(make_batch([Row([5, 6], 0, [1])], 131))
    runner.close()
    pending.result()
    release(runner)
