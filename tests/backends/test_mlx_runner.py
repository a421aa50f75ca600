"""The runner of MLX: prefix hits and what is in the pages afterwards, groups, out of memory, and memory at rest."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

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
from localllm.engine.modelfiles import read_model
from localllm.engine.request import Sampling
from localllm.engine.runner import CacheGroup, Runner

from .batches import Row, make_batch
from .conformance import Conversation, Planned
from .mlx_models import DENSE, SAME_BITS, SLIDING, SMALL, Loaded, no_memory, plain_model
from .test_mlx_shapes import Forced, near

pytestmark = pytest.mark.real_otherdevice

PAGE = SMALL.page_size
CLOSE = 1e-4 if SAME_BITS else 0.02  # CUDA's products take fewer bits of their factors
# A row that draws so must know each token before the next: where steps are planned ahead it computes every second one.
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
    found: Planner = as_is(runner)._planner
    return found


def caches_of(runner: Runner) -> Caches:
    found: Caches = as_is(runner)._caches
    return found


def rest(runner: Runner) -> None:
    as_is(runner)._release()


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of the pool, so far."""
    told = dict.fromkeys(("read", "write", "copy"), 0)

    def counted(name: str) -> Callable[..., Any]:
        own = getattr(Pool, name)

        def call(*given: Any) -> Any:
            told[name] += 1
            return own(*given)

        return call

    for name in told:
        monkeypatch.setattr(Pool, name, counted(name))
    return told


def check_pages(loaded: Loaded, talk: Conversation, texts: list[list[int]]) -> int:
    """The pages of the prefix tree hold what a model computes of these texts; returns how many they are."""
    runner, cache = as_is(loaded.runner), as_is(talk.engine._scheduler._cache)
    rest(runner)
    tree, pool, found = cache._tree, caches_of(runner).pool, 0
    for text in texts:
        pages = [node.pages[0][0] for node in tree.match(tree.root(None), text, 0, len(text))]
        found += len(pages)
        if not pages:
            continue
        held = [KVCache() for _ in pool.keys]
        mx.eval(loaded.model(mx.array([text[: len(pages) * PAGE]]), cache=held))
        places = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()
        for layer, cache in enumerate(held):
            if any(shape.window for shape in runner._loaded.shapes[: layer + 1]):
                break  # it saw more here than it should
            for own, told in ((pool.keys[layer], cache.keys), (pool.values[layer], cache.values)):
                np.testing.assert_allclose(np.array(own)[:, :, places], np.array(told)[:, :, : len(places)], atol=CLOSE)
    return found


def test_a_chat_continues_in_its_own_arrays(loaded: Loaded, planned: Planned, calls: dict[str, int]) -> None:
    """The pages get what a turn added; no turn reads them."""
    rest(loaded.runner)
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
def test_whoever_goes_on_keeps_what_others_begin_with(loaded: Loaded, planned: Planned, sampling: Sampling) -> None:
    """Rows that begin as one that still runs, in its prompt or its answer, some in the same step."""
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
def test_hits_of_prompts_in_chunks(loaded: Loaded, planned: Planned, chunk: int) -> None:
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


@pytest.mark.parametrize(("pages", "rooms"), [(17, 9), (17, 2), (40, 2), (400, 9), (400, 0)])
def test_many_that_begin_alike(
    loaded: Loaded, planned: Planned, monkeypatch: pytest.MonkeyPatch, pages: int, rooms: int
) -> None:
    """They join, leave, are cancelled, give up their pages for others and come back, while all rests now and then."""
    rng = np.random.default_rng(pages + rooms)
    planned.spec = replace(planned.spec, groups=(CacheGroup(PAGE, pages),), max_tokens=40)
    monkeypatch.setattr(planner_of(loaded.runner), "room", rooms * STEP)
    talk, texts, prompts = Conversation(planned), [tokens(rooms, 20)], dict[str, list[int]]()
    while len(prompts) < 20 or talk.engine.has_work:
        if len(prompts) < 20 and rng.random() < 0.3:
            name, base = str(len(prompts)), texts[int(rng.integers(len(texts)))]
            begun = base[: int(rng.integers(1, 100))]
            prompts[name] = [*begun, *rng.integers(3, 131, int(rng.integers(1, 12))).tolist()]
            most = min(pages * PAGE, 128) - len(prompts[name])
            sampling = IN_TURN if rng.random() < 0.3 else None
            talk.submit(name, prompts[name], int(rng.integers(1, min(most, 40))), sampling)
        if rng.random() < 0.04 and prompts:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        if rng.random() < 0.03:
            rest(loaded.runner)
        talk.step()
        texts = [[*prompt, *talk.tokens[name]] for name, prompt in prompts.items()] or texts
    for name, prompt in prompts.items():
        assert talk.tokens[name] == loaded.plain(prompt, len(talk.tokens[name])), name
    assert sum(cached > 0 for cached in talk.cached.values()) > 8
    assert pages > 17 or talk.engine.stats().preemptions > 0
    assert check_pages(loaded, talk, texts) > 8


def test_a_shortage_takes_only_its_own(loaded: Loaded, planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails in which a row begins as one that sits out: that one goes on, also from the pages."""
    talk, first, own = Conversation(planned), tokens(8, 30), mx.async_eval
    talk.submit("first", first, 40, IN_TURN)
    while len(talk.tokens["first"]) < 4:
        talk.step()

    talk.submit("begins alike", [*first, 5], 9)
    if planned.spec.overlap:  # the first must be the one whose turn it is not
        while not talk.engine._scheduler._launched:
            talk.step()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    survived = talk.finishes.get("first") is None
    if survived:
        rest(loaded.runner)
    talk.finish()
    assert talk.finishes["begins alike"] == "no_memory"
    assert survived == planned.spec.overlap
    assert talk.tokens["first"] == loaded.plain(first, len(talk.tokens["first"]))
    assert not survived or len(talk.tokens["first"]) == 40


@pytest.mark.parametrize("rooms", [1, 9])
def test_a_shortage_does_not_take_what_gave_way(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int) -> None:
    """The step fails in which a row begins as one that sits out and had to give up its place for it."""
    text, runner, own = tokens(13, 16), loaded.runner, mx.async_eval
    rest(runner)
    monkeypatch.setattr(planner_of(runner), "room", rooms * STEP)

    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131))
    monkeypatch.setattr(mx, "async_eval", own)
    after = runner.run(make_batch([Row([9], 16, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9], 1)


@pytest.mark.parametrize("rooms", [2, 9], ids=["gave way", "lay together"])
def test_a_shortage_does_not_take_what_its_rows_have_in_common_with_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int
) -> None:
    """The step fails in which a row goes on that began as another. That one sits out, and gives up its place."""
    text, runner, own = tokens(17, 16), loaded.runner, mx.async_eval
    rest(runner)
    monkeypatch.setattr(planner_of(runner), "room", rooms * STEP)
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131)).result()
    runner.run(make_batch([Row([9], 16, [1, 2, 4]), Row([9], 10, [1, 3])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([9], 11, [1, 3]), Row([5], 0, [6])], 131))
    monkeypatch.setattr(mx, "async_eval", own)
    after = runner.run(make_batch([Row([9], 17, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9, 9], 1)


@pytest.mark.parametrize("late", [False, True], ids=["let go at once", "let go late"])
def test_the_pool_is_not_copied_while_some_rows_read_it_and_some_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Not one layer of it. `late`: as a GPU's steps, which let go of what they read a little after they end."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**28))  # a step's own arrays are few beside it
    read = list[mx.array]()
    for number, pages in enumerate(([1, 2], [3, 4])):
        runner.run(make_batch([Row(tokens(number, 16), 0, pages)], 131)).result()
    rest(runner)
    planner_of(runner).room = STEP
    own_read, own_synchronize = Pool.read, mx.synchronize

    def reads(pool: Pool, *given: Any) -> Any:
        read.extend(x[..., :1, :] for x in [*pool.keys, *pool.values])
        mx.eval(read)
        return own_read(pool, *given)

    def synchronize(*given: Any) -> None:
        own_synchronize(*given)
        read.clear()

    if late:
        monkeypatch.setattr(Pool, "read", reads)
        monkeypatch.setattr(mx, "synchronize", synchronize)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    runner.run(make_batch([Row([7, 8], 16, [1, 2, 5]), Row([7, 8], 16, [3, 4, 6])], 131)).result()
    assert mx.get_peak_memory() - before < caches_of(runner).pool.keys[0].nbytes


def test_the_pool_is_not_copied_while_a_chunk_without_an_answer_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends late, and the next step begins with pages that it writes."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**27))
    pool = caches_of(runner).pool
    runner.run(make_batch([Row(tokens(0, 16), 0, [1, 2])], 131)).result()
    rest(runner)
    pair = [Row(tokens(1, 16), 0, [3, 4]), Row(tokens(2, 16), 0, [5, 6])]  # they lie together, and leave together
    runner.run(make_batch(pair, 131)).result()

    def ends_late(given: list[mx.array]) -> None:
        own(given[:-1])
        own(big @ big)
        own(given[-1])

    big, own = mx.random.normal((1500, 1500)), mx.async_eval
    mx.eval(big)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", ends_late)
        runner.run(make_batch([Row([7, 8], 16, [1, 2, 7], Want.NOTHING)], 131))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        patch.setattr(mx, "async_eval", own)
        runner.run(make_batch([Row([9], 0, [4])], 131)).result()
    assert mx.get_peak_memory() - before < sum(x.nbytes for x in [*pool.keys, *pool.values]) / 16


def test_idle_groups_are_freed_before_a_row_passes(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded.runner
    rest(runner)
    monkeypatch.setattr(planner_of(runner), "room", 99 * STEP)
    rows = [Row(tokens(number, 40), 0, list(range(1 + 6 * number, 6 + 6 * number))) for number in range(8)]
    runner.run(make_batch(rows, 131)).result()
    [group] = caches_of(runner).groups.values()
    size, own, used = sum(x.nbytes for x in group.arrays), as_is(runner)._compute_now, list[int]()
    del group

    def passing(*given: Any) -> Any:
        output = own(*given)
        mx.clear_cache()
        used.append(mx.get_active_memory())
        return output

    mx.clear_cache()
    before = mx.get_active_memory()
    monkeypatch.setattr(runner, "_compute_now", passing)
    monkeypatch.setattr(planner_of(runner), "room", 0)
    runner.run(make_batch([Row([7, 7, 7], 8, [1, 50])], 131)).result()
    assert len(used) == 1
    assert used[0] < before - size / 2


@pytest.mark.parametrize(("rooms", "waits"), [(99, 0), (0, 3)], ids=["room for all", "none"])
def test_only_rows_that_pass_are_waited_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int, waits: int
) -> None:
    """A step whose rows lie in groups is started and not waited for. Each row that passes is, and the step before."""
    runner, own, waited = loaded.runner, mx.synchronize, list[Any]()

    def synchronize(*given: Any) -> None:
        waited.append(given)
        own(*given)

    rest(runner)
    monkeypatch.setattr(planner_of(runner), "room", rooms * STEP)
    monkeypatch.setattr(mx, "synchronize", synchronize)
    pending = runner.run(make_batch([Row(tokens(17, 9), 0, [1, 2]), Row(tokens(18, 5), 0, [3])], 131))
    assert len(waited) == waits
    pending.result()


def test_a_row_goes_on_after_equal_pages_took_the_place_of_its_own(loaded: Loaded) -> None:
    """What it has computed of a page since is nowhere but in its old arrays."""
    text, runner = tokens(10, 20), loaded.runner
    runner.run(make_batch([Row(text[:16], 0, [1, 2])], 131)).result()
    runner.run(make_batch([Row(text, 0, [4, 5, 6])], 131)).result()
    after = runner.run(make_batch([Row([7, 8, 9], 20, [1, 2, 6])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 7, 8, 9], 1)


def test_nobody_begins_as_one_whose_step_failed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arrays are gone."""
    text, runner = tokens(13, 16), loaded.runner

    own = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row(text, 0, [1, 2])], 131))
    monkeypatch.setattr(mx, "async_eval", own)
    with pytest.raises(OutOfMemory, match="lost pages"):
        runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131))
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    after = runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 7], 1)


@pytest.mark.parametrize("rooms", [0, 9])
def test_a_page_is_copied_before_it_holds_something_else(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int
) -> None:
    """In the same step, by a row that comes first, and where there is no room is through with it before."""
    monkeypatch.setattr(planner_of(loaded.runner), "room", rooms * STEP)
    text, other, runner = tokens(11, 16), tokens(12, 8), loaded.runner
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    rest(runner)
    rows = [Row(other, 0, [2]), Row([7, 8, 9], 12, [1, 5])]
    after = runner.run(make_batch(rows, 131, [(2, 5)])).result()
    assert after.tokens.tolist() == [*loaded.plain(other, 1), *loaded.plain([*text[:12], 7, 8, 9], 1)]


def test_windows_see_what_was_read_from_arrays_of_others(tmp_path: Path) -> None:
    """Of a row that began so far behind its window that no column of it is seen. Log-probabilities: with any window a
    random model would choose the same tokens."""
    forced, first = Forced(SLIDING, tmp_path), tokens(9, 64)
    pages, shared = forced.pages(64), 0
    near(forced.step(Row(first, 0, pages)), forced.expected(first)[-1:])
    for text in ([*first[:56], *tokens(10, 8)], [*first[:16], *tokens(11, 30)]):
        shared, wanted = 56 if shared == 0 else 16, forced.expected(text)
        own = [*pages[: shared // PAGE], *forced.pages(len(text) - shared)]
        for start, end in pairwise([shared, shared + 3, *range(shared + 4, len(text) + 1)]):
            near(forced.step(Row(text[start:end], start, own)), wanted[end - 1 : end])


def test_rows_that_join_lie_in_the_order_of_the_batch(loaded: Loaded) -> None:
    """Then steps that go on with the last one look at no row, and sort no logits."""
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


def test_a_prefix_that_many_share_does_not_lie_in_memory_for_each(tmp_path: Path) -> None:
    """Pages hold it once, so the engine lets them all in; groups would hold it once for each."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**20, max_rows=12))
    plain = Loaded(runner, plain_model(tmp_path))
    shared = np.random.default_rng(0).integers(3, 131, 64).tolist()
    talk = Conversation(runner)
    talk.submit("first", shared, 1)
    talk.finish()
    for at in range(12):
        talk.submit(str(at), [*shared, at + 3], 20)
    most = 0
    while talk.engine.has_work:
        talk.step()
        most = max(most, planner_of(runner).columns)
    assert most <= planner_of(runner).room
    assert talk.engine.stats().preemptions == 0
    for at in range(12):
        assert talk.tokens[str(at)] == plain.plain([*shared, at + 3], 20)


def test_what_mlx_keeps_is_given_back_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.backends.mlx.runner.IDLE", 0.2)
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), SMALL)
    told = Loaded(runner, plain_model(tmp_path)).plain([5] * 100, 20)
    talk = Conversation(runner)
    for name in "abc":  # the second and third begin with pages of the first, whose group is gone
        talk.submit(name, [5] * 100, 20)
        talk.finish()
        busy = mx.get_cache_memory() and planner_of(runner).columns
        deadline = time.monotonic() + 20
        while (mx.get_cache_memory() or planner_of(runner).columns) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert busy > 0 == mx.get_cache_memory() == planner_of(runner).columns
        assert talk.tokens[name] == told
    assert talk.cached["c"] >= 96


def test_no_rest_while_a_step_is_unread(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes longer than the pause after which nobody seems to compute."""
    runner: Any = loaded.runner
    ahead, turns = Planned(loaded.runner, overlap=True), list[int]()
    monkeypatch.setattr(runner._idle_timer, "_seconds", 0.05)
    own = MlxPending.result

    def slow(pending: MlxPending) -> Any:
        time.sleep(0.3)
        turns.append(planner_of(runner).columns)
        return own(pending)

    monkeypatch.setattr(MlxPending, "result", slow)
    talk = Conversation(ahead)
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    assert min(turns) > 0
    assert talk.tokens["a"] == loaded.plain([5] * 30, 4)
    deadline = time.monotonic() + 20
    while planner_of(runner).columns and time.monotonic() < deadline:
        time.sleep(0.05)
    assert planner_of(runner).columns == 0


def test_prompts_that_come_together_are_computed_together(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one length in one call."""
    runner: Any = loaded.runner
    called, own = list[tuple[int, ...]](), runner._loaded.forward

    def forward(tokens: mx.array, caches: list[Any]) -> Any:
        called.append(tokens.shape)
        return own(tokens, caches)

    monkeypatch.setattr(runner, "_loaded", replace(runner._loaded, forward=forward))
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(3)
    lengths = {"a": 17, "b": 5, "c": 32, "d": 40, "e": 30, "f": 1, "g": 32}
    prompts = {name: rng.integers(3, 131, length).tolist() for name, length in lengths.items()}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 9)
    talk.step()
    assert called == [(1, 17), (1, 5), (2, 32), (1, 40), (1, 30), (1, 1)]
    talk.finish()
    assert talk.tokens == {name: loaded.plain(prompt, 9) for name, prompt in prompts.items()}


def test_nothing_is_left_after_aborts(loaded: Loaded) -> None:
    """Requests that go in the middle of a step that is planned ahead; memory is what it was."""
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
    for turn in range(2, 12):
        churn(turn)
    assert memory() <= before + 2**20


def goes_on_after_a_shortage(loaded: Loaded, talk: Conversation, prompts: dict[str, list[int]]) -> None:
    """Requests a, b and c ended by it, with right tokens until then; two more get theirs whole."""
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
def test_a_step_without_memory_ends_its_requests_and_no_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, cached: int, room: bool
) -> None:
    """As if MLX's allocator refused: what the step was to write is never read, what others share stays right."""
    if not room:
        monkeypatch.setattr(planner_of(loaded.runner), "room", 0)
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(5)
    begun = rng.integers(3, 131, cached).tolist()
    prompts = {name: [*begun, *rng.integers(3, 131, 30).tolist()] for name in "abc"}
    if cached:
        talk.submit("first", [*begun, 5], 4)
        talk.finish()
    for name in "ab":
        talk.submit(name, prompts[name], 12)
    for _ in range(4):
        talk.step()
    own = mx.async_eval

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.submit("c", prompts["c"], 12)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    goes_on_after_a_shortage(loaded, talk, prompts)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("writing", [False, True], ids=["caches", "pages"])
def test_a_shortage_that_only_answers_tell(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, overlap: bool, writing: bool
) -> None:
    """As if Metal refused what was sent to it: requests end; where pages were written that others read, all ends."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=overlap)), np.random.default_rng(11)
    prompts = {name: rng.integers(3, 131, 30).tolist() for name in "abc"}
    for name, count in (("a", 30), ("b", 30), ("c", 3 if writing else 30)):
        talk.submit(name, prompts[name], count)
    while len(talk.tokens["c"]) < 3:
        talk.step()
    while writing and not loaded.runner._wrote_pages[0]:  # type: ignore[attr-defined]
        talk.step()  # it has ended; its row is given up, and pages take what it computed

    def full(*_: object) -> Any:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    monkeypatch.setattr(mlx_runner, "_values", full)
    if writing:
        with pytest.raises(RunnerFailed, match="while pages were written"):
            talk.step()
        return
    talk.step()
    monkeypatch.undo()
    goes_on_after_a_shortage(loaded, talk, prompts)


def test_pages_that_a_step_without_memory_was_to_write(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made from what the step before computes: where that is lost, too, others would read what is nowhere."""
    talk, rng, runner = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(12), loaded.runner
    for name, count in (("a", 30), ("b", 30), ("c", 3)):
        talk.submit(name, rng.integers(3, 131, 30).tolist(), count)
    own = as_is(runner)._compute

    def full(*_: object) -> Any:
        raise OutOfMemory("full")

    def called(*given: Any) -> Any:
        if talk.tokens["a"] and as_is(runner)._wrote_pages[0]:  # the row of c left just now
            monkeypatch.setattr(mlx_runner, "_values", full)
            full()
        return own(*given)

    monkeypatch.setattr(runner, "_compute", called)
    with pytest.raises(RunnerFailed, match="while pages were written"):
        talk.finish()


def held(loaded: Loaded, base: int) -> int:
    """Bytes of arrays above `base` that somebody has, Python's cycles among them."""
    mx.synchronize(loaded.runner._stream)  # type: ignore[attr-defined]
    return mx.get_active_memory() - base


@pytest.fixture
def at_rest(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes in use at rest. Nothing is collected meanwhile: what is old a worker never looks at again."""
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("warm", [5] * 4, 2)
    talk.finish()
    monkeypatch.setattr(runner._idle_timer, "_seconds", 600)
    rest(runner)
    gc.collect()
    gc.disable()
    yield held(loaded, 0)
    gc.enable()


def test_at_rest_groups_are_gone_at_once(loaded: Loaded, at_rest: int) -> None:
    talk = Conversation(Planned(loaded.runner, overlap=False))
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    talk.finish()
    assert held(loaded, at_rest) > 2**19
    rest(loaded.runner)
    assert held(loaded, at_rest) < 2**14


def test_after_a_shortage_its_groups_are_gone_at_once(
    loaded: Loaded, at_rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk, own = Conversation(Planned(loaded.runner, overlap=False)), mx.async_eval
    for name in "abcd":
        talk.submit(name, [5 + ord(name) % 100] * 60, 60)
    for _ in range(10):
        talk.step()
    assert held(loaded, at_rest) > 2**19

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    assert set(talk.finishes.values()) == {"no_memory"}
    assert held(loaded, at_rest) < 2**14


def test_what_a_rest_without_memory_did_not_write_the_next_step_asks_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = loaded.runner
    talk = Conversation(Planned(loaded.runner, overlap=False))
    talk.submit("a", [5] * 30, 4)
    talk.finish()
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        rest(runner)
    assert runner._caches.pool.changed
    talk.submit("b", [5] * 30, 4)
    talk.finish()
    assert talk.tokens["b"] == talk.tokens["a"] == loaded.plain([5] * 30, 4)
