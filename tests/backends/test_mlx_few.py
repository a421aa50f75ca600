"""Calls for few new tokens of each row, and what is kept of them, on MLX's CPU device with the ops' references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx

from localllm.backends import mlx
from localllm.backends.mlx import caches, few, rotary
from localllm.backends.mlx.caches import STEP, Group
from localllm.backends.mlx.few import FewCalls
from localllm.backends.mlx.trunk import Trunk
from localllm.engine.modelfiles import read_model
from localllm.kernels.mlx_cuda import few_tokens

from . import test_mlx_rotary
from .conformance import Conversation, Planned
from .test_mlx import SMALL, Loaded, join_and_leave, no_memory, patched, plain_model
from .test_mlx_rotary import KINDS
from .tiny import Tiny

pytestmark = pytest.mark.real_otherdevice


@pytest.fixture(autouse=True, scope="module")
def in_place() -> Iterator[None]:
    yield from patched(rotary, "IN_PLACE", True)


@pytest.fixture(autouse=True, scope="module")
def decodes() -> Iterator[None]:
    yield from patched(caches, "DECODES", True)


@pytest.fixture(autouse=True, scope="module")
def all_kinds() -> Iterator[None]:
    """In types, too, that the kernels leave to their references."""
    yield from patched(caches, "few", lambda new, _: 1 < new <= 64)


class TestMlxFew(test_mlx_rotary.TestMlxInPlace):
    """As on CUDA: prompts, too, turn late, and are traced."""


@pytest.fixture
def references() -> None:
    if mx.cuda.is_available():
        pytest.skip("heads of tiny models are none that its kernels compute")


class Asked:
    """Counts the calls that Python makes of a trunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self._own = 0, Trunk.call
        monkeypatch.setattr(Trunk, "call", lambda *given: self._call(*given))

    def _call(self, trunk: Trunk, model: Any, tokens: mx.array, *given: Any) -> Any:
        self.times += tokens.shape[1] > 1
        return self._own(trunk, model, tokens, *given)


@pytest.fixture(params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    request.param.save(tmp_path)
    return Loaded(mlx.open(read_model(tmp_path), SMALL), plain_model(tmp_path))


@pytest.mark.parametrize("step", [16, 256], ids=["growing", "roomy"])
def test_rows_that_join_and_leave_equal_mlx_lm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """One by one, as they come."""
    monkeypatch.setattr(caches, "STEP", step)
    join_and_leave(loaded, np.random.default_rng(step), overlap=True, requests=16, joins=0.4, leaves=0.03)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[few.Shape]:
    """Of the calls that were made."""
    found, own = list[few.Shape](), FewCalls._answered

    def answered(calls: FewCalls, shape: few.Shape, *given: Any) -> Any:
        found.append(shape)
        return own(calls, shape, *given)

    monkeypatch.setattr(FewCalls, "_answered", answered)
    return found


@pytest.mark.usefixtures("references")
def test_rows_that_come_together_equal_mlx_lm(loaded: Loaded, shapes: list[few.Shape]) -> None:
    """Groups of several rows, and several groups in a call, first as they are and then traced."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(2)
    begin = rng.integers(3, 131, 24).tolist()
    for turn in range(4):
        prompts = {
            f"{turn} new {place}": rng.integers(3, 131, length).tolist() for place, length in enumerate((9, 9, 14))
        }
        prompts |= {f"{turn} behind {place}": [*begin, *rng.integers(3, 131, 8 + place).tolist()] for place in range(2)}
        for name, prompt in prompts.items():
            talk.submit(name, prompt, 5)
        talk.finish()
        for name, prompt in prompts.items():
            assert talk.tokens[name] == loaded.plain(prompt, 5), name
    several = [shape for shape in shapes if len(shape.groups) > 1]
    assert any(rows > 1 for shape in several for rows, *_ in shape.groups)
    assert len(several) > len(set(several)), "none was traced"


@pytest.mark.usefixtures("references")
def test_a_hit_in_a_row_among_others_has_a_shape_of_its_own_seldom(loaded: Loaded, shapes: list[few.Shape]) -> None:
    """Wherever the row begins in its group."""
    group = Group.empty(loaded.runner._loaded.shapes, 2 * STEP, 3)  # type: ignore[attr-defined]
    group.end, group.padding = 300, [0, 7, 100]
    assert [group.begun(row, 150, STEP).columns for row in range(3)] == [2 * STEP, STEP, STEP]
    assert group.begun(2, 200, STEP).columns == STEP
    assert group.begun(1, 290, 2 * STEP).columns == 2 * STEP - 7, "fewer would not hold it"


@pytest.mark.usefixtures("references")
def test_calls_that_warm_leave_nothing_behind(
    loaded: Loaded, shapes: list[few.Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA every runner makes them when it is opened."""
    runner: Any = loaded.runner
    before, kinds, own = mx.get_active_memory(), list[tuple[int, bool]](), caches.Forward.__init__

    def told(forward: caches.Forward, groups: list[Group], new: int, *given: Any) -> None:
        own(forward, groups, new, *given)
        kinds.append((new, forward.in_place))

    monkeypatch.setattr(caches.Forward, "__init__", told)
    runner.warm()
    assert mx.get_cache_memory() == 0
    assert {(1, True), (1, False)} <= set(kinds)
    assert shapes[-1].groups[0][2] > few_tokens.SHARE, "several warps share the columns of a query"
    assert runner._before is None
    assert mx.get_active_memory() <= before + 2**16
    talk = Conversation(loaded.runner)
    talk.submit("a", [5, 9, 77, 30], 10)
    assert talk.finish() == {"a": loaded.plain([5, 9, 77, 30], 10)}


@pytest.mark.usefixtures("references")
def test_where_there_is_no_memory_nothing_is_warmed(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", no_memory)
        loaded.runner.warm()  # type: ignore[attr-defined]
    assert loaded.runner._before is None  # type: ignore[attr-defined]
    talk = Conversation(loaded.runner)
    talk.submit("a", [5, 9, 77, 30], 10)
    assert talk.finish() == {"a": loaded.plain([5, 9, 77, 30], 10)}


@pytest.mark.usefixtures("references")
def test_python_asks_twice_and_no_more(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hits are of one shape, if not of one length."""
    talk, begin = Conversation(Planned(loaded.runner, overlap=True)), [5, 9, 77, 30] * 5
    talk.submit("begin", begin, 1)
    talk.finish()
    asked = Asked(monkeypatch)
    for hit, (more, times) in enumerate([(3, 1), (7, 2), (5, 2), (12, 2), (1, 2)]):
        prompt = [*begin, *range(40 + hit, 40 + hit + more)]
        talk.submit(f"{hit}", prompt, 4)
        talk.finish()
        assert talk.cached[f"{hit}"] >= 16
        assert talk.tokens[f"{hit}"] == loaded.plain(prompt, 4)
        assert asked.times == times, hit


class Direct:
    """Calls of a tiny model, beside the model itself."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        tiny.save(folder)
        found = mlx.open(read_model(folder), SMALL)._loaded  # type: ignore[attr-defined]
        self.calls, self.shapes = FewCalls(found.model, found.trunk, found.shapes), found.shapes
        self.plain = plain_model(folder)

    def check(self, tokens: list[int], room: int = STEP) -> None:
        """From nothing on."""
        group = Group.empty(self.shapes, room)
        logits, _ = self.calls.call([group], [len(tokens)], mx.array([tokens]))
        assert group.end == len(tokens)
        assert mx.allclose(logits, self.plain(mx.array([tokens]))[:, -1], atol=1e-4)


@pytest.mark.usefixtures("references")
def test_a_model_that_looks_at_what_it_computes_is_not_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, own = Direct(KINDS[0], tmp_path), Trunk.call

    def looks(trunk: Trunk, model: Any, tokens: mx.array, *given: Any) -> Any:
        assert tokens.max().item() < 131
        return own(trunk, model, tokens, *given)

    monkeypatch.setattr(Trunk, "call", looks)
    for first in range(4):
        direct.check([first, 8, 9])


@pytest.mark.usefixtures("references")
def test_few_traces_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the shapes that were met last."""
    monkeypatch.setattr(few, "TRACES", 2)
    direct, asked = Direct(KINDS[0], tmp_path), Asked(monkeypatch)
    for count, times in [(3, 1), (3, 2), (4, 3), (4, 4), (3, 4), (5, 5), (3, 5), (4, 6), (4, 7), (4, 7)]:
        direct.check(list(range(count)))
        assert asked.times == times
    assert len(direct.calls._met) == 2


@pytest.mark.usefixtures("references")
def test_caches_grow_where_there_is_no_room(tmp_path: Path) -> None:
    direct = Direct(KINDS[0], tmp_path)
    group = Group.empty(direct.shapes, STEP)
    tokens = np.random.default_rng(1).integers(3, 131, STEP + 30).tolist()
    for start in range(0, len(tokens), 22):
        part = tokens[start : start + 22]
        logits, _ = direct.calls.call([group], [len(part)], mx.array([part]))
    assert group.end == len(tokens)
    assert mx.allclose(logits, direct.plain(mx.array([tokens]))[:, -1], atol=1e-4)
