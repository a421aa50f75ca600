"""Calls for few new tokens of each row, and what is kept of them, on MLX's CPU device with the ops' references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx_lm.utils

from localllm.backends import mlx
from localllm.backends.mlx import caches, few, rotary
from localllm.backends.mlx.caches import STEP, Group
from localllm.backends.mlx.few import FewCalls
from localllm.backends.mlx.trunk import Trunk
from localllm.engine.modelfiles import read_model

from . import test_mlx_rotary
from .conformance import Conversation, Planned
from .test_mlx import SMALL, Loaded, join_and_leave, patched
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
    return Loaded(mlx.open(read_model(tmp_path), SMALL), mlx_lm.utils.load_model(tmp_path)[0])


@pytest.mark.parametrize("step", [16, 256], ids=["growing", "roomy"])
def test_rows_that_join_and_leave_equal_mlx_lm(loaded: Loaded, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Groups of several rows, and several groups in a call."""
    monkeypatch.setattr(caches, "STEP", step)
    join_and_leave(loaded, np.random.default_rng(step), overlap=True, requests=16, joins=0.4, leaves=0.03)


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
        self.plain = mlx_lm.utils.load_model(folder)[0]

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
