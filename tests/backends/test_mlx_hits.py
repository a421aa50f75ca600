"""Prefix hits on MLX: whose arrays a row begins in, and what is in the pages afterwards."""

from __future__ import annotations

from collections.abc import Callable
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
from localllm.backends.mlx import caches, rotary
from localllm.backends.mlx import runner as runner_module
from localllm.backends.mlx.caches import STEP, Group, LayerShape
from localllm.backends.mlx.pool import PIECES, Pool
from localllm.backends.mlx.residents import Residents
from localllm.engine.batch import Want
from localllm.engine.errors import OutOfMemory
from localllm.engine.modelfiles import read_model
from localllm.engine.request import Sampling
from localllm.engine.runner import CacheGroup, Runner

from .batches import Row, make_batch
from .conformance import Conversation, Planned
from .test_mlx import DENSE, SAME_BITS, SLIDING, SMALL, Loaded, no_memory, plain_model
from .test_mlx_shapes import Forced, near

pytestmark = pytest.mark.real_otherdevice

PAGE = SMALL.page_size
CLOSE = 1e-4 if SAME_BITS else 0.02  # CUDA's products take fewer bits of their factors
# Who draws so must know each token before the next: where steps are planned ahead it sits out every other one.
IN_TURN = Sampling(frequency_penalty=1e-12)


@pytest.fixture(scope="module", params=[DENSE, SLIDING], ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param.label)
    request.param.save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "IN_PLACE", True)
        found = Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))
    if not mx.cuda.is_available():
        assert as_is(found.runner)._loaded.turns_late
        as_is(found.runner)._loaded = replace(as_is(found.runner)._loaded, turns_late=False)
    return found


@pytest.fixture(params=["in-turn", "overlapped", "as on CUDA"])
def planned(loaded: Loaded, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """On CUDA prompts are filled up, rows that decode lie in one group, and kernels of ours are told which columns they
    see, and write (their references compute)."""
    if request.param == "as on CUDA":
        if not mx.cuda.is_available():
            monkeypatch.setattr(loaded.runner, "_loaded", replace(as_is(loaded.runner)._loaded, turns_late=True))
        monkeypatch.setattr(caches, "DECODES", True)
        monkeypatch.setattr(caches, "few", lambda new, _: 1 < new <= 64)
        monkeypatch.setattr(caches, "PREFILL", 16)
        monkeypatch.setattr(residents(loaded.runner).groups, "_group_columns", None)
    return Planned(loaded.runner, overlap=request.param != "in-turn")


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def as_is(thing: Any) -> Any:
    """With what is its own business."""
    return thing


def residents(runner: Runner) -> Residents:
    found: Residents = as_is(runner)._residents
    return found


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
    runner._give_back()
    tree, pool, found = cache._tree, residents(runner).pool, 0
    for text in texts:
        pages = [node.page for node in tree.match(tree.root(None), text, 0, len(text))]
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


def test_a_hit_copies_no_pages_while_its_prefix_lies_there(
    loaded: Loaded, planned: Planned, calls: dict[str, int]
) -> None:
    """The first request has ended; the second begins within its prompt, the third within its answer."""
    talk, first = Conversation(planned), tokens(1, 45)
    talk.submit("first", first, 30)
    talk.finish()
    for name, length in (("prompt", 32), ("answer", 64), ("begun page", 59)):
        before = dict(calls)
        prompt = [*[*first, *talk.tokens["first"]][:length], 9, 8, 7]
        talk.submit(name, prompt, 2)
        while not talk.tokens[name]:
            talk.step()
        assert calls == before, name
        talk.finish()
        assert talk.tokens[name] == loaded.plain(prompt, 2), name
        assert talk.cached[name] == length, name
    texts = [[*first, *talk.tokens["first"]]]
    assert check_pages(loaded, talk, texts) == 9


def test_a_chat_goes_on_in_its_own_arrays(loaded: Loaded, planned: Planned, calls: dict[str, int]) -> None:
    """Nobody else has them: nothing is copied, neither to pages nor to other arrays."""

    def address() -> int:
        [placed] = residents(loaded.runner).groups
        return int(np.asarray(memoryview(placed.group.keys[0])).ctypes.data)

    residents(loaded.runner).rest()
    talk, text = Conversation(planned), tokens(2, 21)
    places, before = set[int](), dict(calls)
    for turn in range(5):
        talk.submit(str(turn), text, 7)
        talk.finish()
        assert talk.tokens[str(turn)] == loaded.plain(text, 7)
        assert talk.cached[str(turn)] == (0 if turn == 0 else (len(text) - 3) // PAGE * PAGE)
        text = [*text, *talk.tokens[str(turn)], 50 + turn, 60 + turn]
        if SAME_BITS:  # on CUDA a look at an array may move it
            places.add(address())
    assert calls == before
    assert len(places) <= 1
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
    monkeypatch.setattr(residents(loaded.runner).groups, "room", rooms * STEP)
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
            as_is(loaded.runner)._give_back()
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
        residents(loaded.runner).rest()
    talk.finish()
    assert talk.finishes["begins alike"] == "no_memory"
    assert survived == planned.spec.overlap
    assert talk.tokens["first"] == loaded.plain(first, len(talk.tokens["first"]))
    assert not survived or len(talk.tokens["first"]) == 40


@pytest.mark.parametrize("rooms", [1, 9])
def test_a_shortage_does_not_take_what_gave_way(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int) -> None:
    """The step fails in which a row begins as one that sits out and had to give up its place for it."""
    text, runner, own = tokens(13, 16), loaded.runner, mx.async_eval
    residents(runner).rest()
    monkeypatch.setattr(residents(runner).groups, "room", rooms * STEP)

    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131))
    monkeypatch.setattr(mx, "async_eval", own)
    after = runner.run(make_batch([Row([9], 16, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9], 1)


@pytest.mark.parametrize(("rooms", "group_columns"), [(2, 4096), (9, None)], ids=["gave way", "lay together"])
def test_a_shortage_does_not_take_what_its_rows_have_in_common_with_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int, group_columns: int | None
) -> None:
    """The step fails in which a row goes on that began as another. That one sits out, and gives up its place."""
    text, runner, own = tokens(17, 16), loaded.runner, mx.async_eval
    residents(runner).rest()
    monkeypatch.setattr(residents(runner).groups, "room", rooms * STEP)
    monkeypatch.setattr(residents(runner).groups, "_group_columns", group_columns)
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    runner.run(make_batch([Row([7, 8], 8, [1, 3])], 131)).result()
    runner.run(make_batch([Row([9], 16, [1, 2, 4]), Row([9], 10, [1, 3])], 131)).result()
    monkeypatch.setattr(mx, "async_eval", no_memory)
    with pytest.raises(OutOfMemory):
        runner.run(make_batch([Row([9], 11, [1, 3]), Row([5], 0, [6])], 131))
    monkeypatch.setattr(mx, "async_eval", own)
    after = runner.run(make_batch([Row([9], 17, [1, 2, 4])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 9, 9], 1)


def test_a_shortage_while_a_row_passes_that_began_in_the_arrays_of_others(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found no room: it holds nothing any more when the step is given up."""
    texts, runner = [tokens(15, 16), tokens(16, 16)], loaded.runner
    residents(runner).rest()
    monkeypatch.setattr(residents(runner).groups, "room", 2 * STEP)
    runner.run(make_batch([Row(texts[0], 0, [1, 2]), Row(texts[1], 0, [5, 6])], 131)).result()
    rows = [Row([9], 16, [1, 2, 3]), Row([9], 16, [5, 6, 7])]
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        with pytest.raises(OutOfMemory):
            runner.run(make_batch([*rows, Row([7, 8], 8, [1, 4])], 131))
    after = runner.run(make_batch(rows, 131)).result()
    assert after.tokens.tolist() == [loaded.plain([*text, 9], 1)[0] for text in texts]


@pytest.mark.parametrize("late", [False, True], ids=["let go at once", "let go late"])
def test_the_pool_is_not_copied_while_some_rows_read_it_and_some_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Not one layer of it. `late`: as a GPU's steps, which let go of what they read a little after they end."""
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**28))  # a step's own arrays are few beside it
    held, read = residents(runner), list[mx.array]()
    for number, pages in enumerate(([1, 2], [3, 4])):
        runner.run(make_batch([Row(tokens(number, 16), 0, pages)], 131)).result()
    as_is(runner)._give_back()
    held.groups.room = STEP
    own_read, own_synchronize = Pool.read, mx.synchronize

    def reads(pool: Pool, *given: Any) -> Group:
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
    assert mx.get_peak_memory() - before < held.pool.keys[0].nbytes


def test_the_pool_is_not_copied_while_a_chunk_without_an_answer_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends late, and the next step begins with pages that it writes."""
    monkeypatch.setattr(runner_module, "DECODES", True)
    DENSE.save(tmp_path)
    runner = mlx.open(read_model(tmp_path), replace(SMALL, cache_bytes=2**27))
    pool = residents(runner).pool
    runner.run(make_batch([Row(tokens(0, 16), 0, [1, 2])], 131)).result()
    as_is(runner)._give_back()
    pair = [Row(tokens(1, 16), 0, [3, 4]), Row(tokens(2, 16), 0, [5, 6])]  # they lie together, and leave together
    runner.run(make_batch(pair, 131)).result()

    def ends_late(given: list[mx.array]) -> None:
        own(given[:-1])
        own(big @ big)
        own(given[-1])

    def pages_first(given: list[mx.array]) -> None:
        own([*pool.keys, *pool.values])
        own(given)

    big, own = mx.random.normal((1500, 1500)), mx.async_eval
    mx.eval(big)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", ends_late)
        runner.run(make_batch([Row([7, 8], 16, [1, 2, 7], Want.NOTHING)], 131))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        patch.setattr(mx, "async_eval", pages_first)
        runner.run(make_batch([Row([9], 0, [4])], 131)).result()
    assert mx.get_peak_memory() - before < sum(x.nbytes for x in [*pool.keys, *pool.values]) / 16


@pytest.mark.parametrize(
    ("owner", "heirs", "room", "filled"),
    [(20, [10], 48, 1), (16, [18, 18], 64, 1), (16, [15], 32, 16)],
    ids=["in long arrays", "in arrays that are to grow", "filled up"],
)
def test_heirs_take_no_more_than_there_is_room_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, owner: int, heirs: list[int], room: int, filled: int
) -> None:
    """In columns of 16: whoever has the arrays they begin in sits out, and gives way."""
    held, runner, text = residents(loaded.runner), loaded.runner, tokens(14, 20)
    held.rest()
    monkeypatch.setattr(caches, "STEP", 16)
    monkeypatch.setattr(caches, "PREFILL", filled)
    monkeypatch.setattr(held.groups, "room", room)
    runner.run(make_batch([Row(text[:owner], 0, [1, 2, 3])], 131)).result()
    rows = [Row(tokens(end, end - 8), 8, [1, 4 + 2 * at, 5 + 2 * at]) for at, end in enumerate(heirs)]
    after = runner.run(make_batch(rows, 131)).result()
    assert held.groups.columns == 32 * len(heirs)  # they lie there, and nobody else
    assert after.tokens.tolist() == [loaded.plain([*text[:8], *row.tokens], 1)[0] for row in rows]


def test_who_gives_way_is_gone_while_a_row_passes(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that began in another's arrays and found no room, either, does not keep them."""
    held, runner = residents(loaded.runner), loaded.runner
    held.rest()
    monkeypatch.setattr(held.groups, "room", 99 * STEP)
    rows = [Row(tokens(number, 40), 0, list(range(1 + 6 * number, 6 + 6 * number))) for number in range(8)]
    runner.run(make_batch(rows, 131)).result()
    *_, owner = (placed.group for placed in held.groups)
    size, own, used = sum(x.nbytes for x in [*owner.keys, *owner.values]), held._passing, list[int]()

    def passing(*given: Any) -> Any:
        yield from own(*given)
        mx.clear_cache()
        used.append(mx.get_active_memory())

    mx.eval(held.take_changed())
    mx.clear_cache()
    before = mx.get_active_memory()
    monkeypatch.setattr(held, "_passing", passing)
    monkeypatch.setattr(held.groups, "room", 0)
    runner.run(make_batch([Row([7, 7, 7], 8, [1, 50])], 131)).result()
    assert len(used) == 1
    assert used[0] < before - size / 2


@pytest.mark.parametrize(("rooms", "waits"), [(99, 0), (0, 2)], ids=["room for all", "none"])
def test_only_rows_that_pass_are_waited_for(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int, waits: int
) -> None:
    """A step whose rows lie in groups is on its way when it is asked for."""
    held, runner, own, waited = residents(loaded.runner), loaded.runner, mx.synchronize, list[Any]()

    def synchronize(*given: Any) -> None:
        waited.append(given)
        own(*given)

    as_is(runner)._give_back()
    monkeypatch.setattr(held.groups, "room", rooms * STEP)
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
    with pytest.raises(OutOfMemory, match="what this one builds on"):
        runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131))
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    after = runner.run(make_batch([Row([7], 16, [1, 2, 3])], 131)).result()
    assert after.tokens.tolist() == loaded.plain([*text, 7], 1)


@pytest.mark.parametrize("rooms", [0, 9])
def test_a_page_is_copied_before_it_holds_something_else(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, rooms: int
) -> None:
    """In the same step, by a row that comes first, and where there is no room is through with it before."""
    monkeypatch.setattr(residents(loaded.runner).groups, "room", rooms * STEP)
    text, other, runner = tokens(11, 16), tokens(12, 8), loaded.runner
    runner.run(make_batch([Row(text, 0, [1, 2])], 131)).result()
    residents(runner).rest()
    rows = [Row(other, 0, [2]), Row([7, 8, 9], 12, [1, 5])]
    after = runner.run(make_batch(rows, 131, [(2, 5)])).result()
    assert after.tokens.tolist() == [*loaded.plain(other, 1), *loaded.plain([*text[:12], 7, 8, 9], 1)]


@pytest.mark.parametrize("pieces", [1, 2, PIECES, PIECES + 1, 12])
def test_pages_are_written_and_read_in_pieces(pieces: int) -> None:
    """Of one row of a group, and of several at once; what lies behind the last position does not matter."""
    shape, rng, size = LayerShape(2, 8, 4, mx.float32, 0), np.random.default_rng(pieces), 4
    group = Group([mx.random.normal((3, 2, 64, 8))], [mx.random.normal((3, 2, 64, 4))], 60, [0, 9, 3])
    for rows in ([1], [0, 2]):
        pool = Pool([shape], 600, size)
        runs = rng.permutation(40)[: pieces * len(rows)].reshape(len(rows), pieces) * 14 + 1
        lengths = [1] * (pieces - 1) + [13 - pieces]
        pages = [np.concatenate([run + np.arange(n) for run, n in zip(each, lengths, strict=True)]) for each in runs]
        starts, ends = [5 + row for row in rows], [47 - row for row in rows]
        pool.write(group, rows, pages, [0] * len(rows), starts)
        pool.write(group, rows, pages, starts, ends)
        assert pool.changed
        for row, own, end in zip(rows, pages, ends, strict=True):
            first, read = group.padding[row], pool.read(own, end)
            assert (read.end, read.padding) == (end, [0])
            for held, whole in ((read.keys, group.keys), (read.values, group.values)):
                assert mx.array_equal(held[0][0, :, :end], whole[0][row, :, first : first + end])
                assert held[0].shape[2] <= STEP


def test_copies_of_pages_are_all_read_first() -> None:
    shape, size = LayerShape(2, 8, 4, mx.float32, 0), 4
    pool = Pool([shape], 9, size)
    pool.keys, pool.values = [mx.random.normal((1, 2, 40, 8))], [mx.random.normal((1, 2, 40, 4))]
    before = np.array(pool.keys[0]), np.array(pool.values[0])
    pool.copy(np.array([[1, 2], [2, 1], [5, 7]]))
    for held, was in zip((pool.keys[0], pool.values[0]), before, strict=True):
        told, now = was.reshape(1, 2, 10, size, -1), np.array(held).reshape(1, 2, 10, size, -1)
        np.testing.assert_array_equal(now, told[:, :, [0, 2, 1, 3, 4, 5, 6, 5, 8, 9]])


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
