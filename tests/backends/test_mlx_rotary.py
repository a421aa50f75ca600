"""Steps that turn queries and keys where keys are written: on MLX's CPU device, with the op's reference or a stand-in
that writes in place as the kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx_lm.models import llama

from localllm.backends import mlx
from localllm.backends.mlx import attention as ours
from localllm.backends.mlx import caches, rotary, runner
from localllm.backends.mlx.trunk import Trunk
from localllm.engine.modelfiles import read_model
from localllm.engine.runner import Runner
from localllm.kernels.metal.rope_store import Rope, Store, Stored, reference

from . import canary
from .conformance import BUDGET, Conformance, Conversation, Planned
from .test_mlx import (
    EXPERTS,
    SAME_BITS,
    SLIDING,
    SMALL,
    Loaded,
    RoomForAll,
    join_and_leave,
    no_memory,
    patched,
    plain_model,
)
from .tiny import TINIES, Tiny

pytestmark = pytest.mark.real_otherdevice

OF = {tiny.label: tiny for tiny in TINIES}
KINDS = [OF["qwen3"], OF["llama-llama3-old"], SLIDING, EXPERTS]


class InPlace:
    """Writes into the memory of the caches, whoever else has it, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def prepared(self, _q: mx.array, _keys: mx.array, _values: mx.array, rope: Rope) -> Store:
        def store(
            q: mx.array, k: mx.array, v: mx.array, keys: mx.array, values: mx.array, padding: mx.array, end: mx.array
        ) -> Stored:
            self.calls += 1
            stored = reference(q, k, v, keys, values, padding, end, rope)
            mx.eval(stored, keys, values)
            column = end.item() - 1
            for held, new in ((keys, stored.keys), (values, stored.values)):
                np.array(held, copy=False)[:, :, column] = np.array(new)[:, :, column]
            return Stored(stored.queries, keys, values)

        return store


@pytest.fixture(autouse=True, scope="module")
def in_place() -> Iterator[None]:
    yield from patched(rotary, "IN_PLACE", True)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> InPlace:
    if mx.cuda.is_available():
        pytest.skip("heads of tiny models are none that its kernels compute")
    op = InPlace()
    monkeypatch.setattr(rotary, "prepared", op.prepared)
    return op


@pytest.mark.real_otherdevice
class TestMlxInPlace(RoomForAll, Conformance):
    """As on CUDA, in a type that its kernels compute; elsewhere the op's reference does."""

    backend = "mlx"
    same_bits = SAME_BITS

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        folder = canary.save(tmp_path_factory.mktemp("canary"), torch.bfloat16)
        runner = mlx.open(read_model(folder), replace(BUDGET, cache_bytes=(BUDGET.cache_bytes or 0) // 2))
        assert runner._loaded.turns_late  # type: ignore[attr-defined]
        return runner

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def decodes(cls) -> Iterator[None]:
        yield from patched(caches, "DECODES", True)


@pytest.mark.real_otherdevice
class TestMlxInPlaceWithLittleRoom(TestMlxInPlace):
    """Groups grow again and again."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def little_room(cls) -> Iterator[None]:
        yield from patched(caches, "STEP", 16)


@pytest.fixture(params=KINDS, ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    return opened(request.param, tmp_path)


def opened(tiny: Tiny, folder: Path) -> Loaded:
    tiny.save(folder)
    return Loaded(mlx.open(read_model(folder), SMALL), plain_model(folder))


def late(loaded: Loaded) -> bool:
    return loaded.runner._loaded.turns_late  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("decodes", [True, False], ids=["as-on-cuda", "as-on-metal"])
@pytest.mark.parametrize("step", [8, 256], ids=["growing", "roomy"])
def test_rows_that_join_and_leave_equal_mlx_lm(
    loaded: Loaded, op: InPlace, monkeypatch: pytest.MonkeyPatch, decodes: bool, step: int
) -> None:
    """Groups of several rows and several groups; with little room they grow again and again."""
    monkeypatch.setattr(caches, "DECODES", decodes)
    monkeypatch.setattr(caches, "STEP", step)
    assert late(loaded)
    join_and_leave(loaded, np.random.default_rng(step), overlap=True, requests=12, joins=0.15)
    assert op.calls > 60


def test_another_goes_on_from_pages_in_the_middle(loaded: Loaded, op: InPlace) -> None:
    """It reads what steps in place wrote, while they go on."""
    talk, rng = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(3)
    prompts = {"first": rng.integers(3, 131, 20).tolist()}
    talk.submit("first", prompts["first"], 60)
    while len(talk.tokens["first"]) < 30:
        talk.step()
    prompts["second"] = [*prompts["first"], *talk.tokens["first"][:20], 7]
    talk.submit("second", prompts["second"], 30)
    assert talk.finish() == {"first": loaded.plain(prompts["first"], 60), "second": loaded.plain(prompts["second"], 30)}
    assert talk.cached["second"] >= 32
    assert op.calls > 60


def test_only_steps_that_write_nothing_else_do_not_wait(
    tmp_path: Path, op: InPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step before still reads what MLX is to write it would copy it: prompts, the first steps of a group and
    those that it grows in wait."""
    monkeypatch.setattr(runner, "DECODES", True)
    monkeypatch.setattr(caches, "STEP", 16)
    loaded = opened(OF["qwen3"], tmp_path)
    talk, own, waits = Conversation(Planned(loaded.runner, overlap=True)), mx.eval, list[Any]()
    last: Any = lambda: loaded.runner._last  # type: ignore[attr-defined]  # noqa: E731

    def told(*given: Any) -> None:
        if last() is not None and len(given) == 1 and given[0] is last().tokens:
            waits.append(given)
        own(*given)

    monkeypatch.setattr(runner.mx, "eval", told)
    talk.submit("a", [5] * 12, 40)
    steps = list[int]()
    while talk.engine.has_work:
        before = len(waits)
        talk.step()
        steps.append(len(waits) - before)
    assert talk.tokens["a"] == loaded.plain([5] * 12, 40)
    assert steps[:20] == [0, 1, 0, 0, 0, 1] + [0] * 14


def test_our_own_attention_reads_what_was_written(op: InPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short rows of one length, too: MLX's own on CUDA may be several kernels."""
    monkeypatch.setattr(caches, "DECODES", True)
    shape, rope = caches.LayerShape(2, 64, 64, mx.float32, 0), Rope(64, False, 1e4)
    group = caches.Group.empty([shape], 10, 3)
    group.append(0, *mx.random.normal((2, 3, 2, 5, 64)))
    group.end, held = 5, group.keys[0]
    forward = caches.Forward([group], 1, [shape], in_place=True)
    [layer] = forward.layers()
    assert isinstance(layer.make_mask(1), ours.Seen)
    q, k, v = (mx.random.normal((3, heads, 1, 64)) for heads in (4, 2, 2))
    _, keys, values = forward.store(0, rotary.Unturned(q, rope), k, v)
    assert isinstance(keys, ours.Unread)
    assert keys.held is held
    assert keys.end == values.end == 6
    assert op.calls == 1


@pytest.mark.parametrize(
    ("label", "told"),
    [
        ("llama", True),
        ("llama-linear", True),
        ("llama-llama3-old", True),
        ("llama-yarn-old", False),  # it scales what it turns
        ("gemma3-old", True),
    ],
)
@pytest.mark.usefixtures("op")
def test_which_models_turn_late(tmp_path: Path, label: str, told: bool) -> None:
    assert late(opened(OF[label], tmp_path)) == told


def scaled(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    """As llama4: its scale of attention depends on the position."""
    return own(part, x * mx.log(cache.offset + 2), mask, cache)  # type: ignore[no-any-return]


def unmasked(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    return own(part, x, None, cache)  # type: ignore[no-any-return]


def sinking(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    """As gpt-oss: MLX's attention computes this, and may copy keys before it does."""
    with pytest.MonkeyPatch.context() as patch:
        attention = llama.scaled_dot_product_attention
        sinks = mx.zeros(part.n_heads)
        patch.setattr(llama, ours.NAME, lambda *given, **more: attention(*given, **more, sinks=sinks))
        return own(part, x, mask, cache)  # type: ignore[no-any-return]


def masking(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    """Where there are several tokens: with a mask of its own making."""
    return own(part, x, mask if x.shape[1] == 1 else mx.array(mask), cache)  # type: ignore[no-any-return]


def half_turned(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    """As multi-head latent attention: what is turned is joined with what is not."""
    with pytest.MonkeyPatch.context() as patch:
        rope = part.rope
        patch.setattr(part, "rope", lambda x, offset: mx.concatenate([x[..., :8], rope(x[..., 8:], offset)], axis=-1))
        return own(part, x, mask, cache)  # type: ignore[no-any-return]


def unturned_keys(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    with pytest.MonkeyPatch.context() as patch:
        rope = part.rope
        patch.setattr(part, "rope", lambda x, offset: rope(x, offset if x.shape[1] == part.n_heads else 0))
        return own(part, x, mask, cache)  # type: ignore[no-any-return]


def keys_turned_otherwise(own: Any, part: Any, x: mx.array, cache: Any, mask: Any) -> mx.array:
    with pytest.MonkeyPatch.context() as patch:
        rope, other = part.rope, rotary.LATE[nn.RoPE](16)
        object.__setattr__(other, "rope", Rope(16, False, 500.0))
        patch.setattr(part, "rope", lambda x, offset: (rope if x.shape[1] == part.n_heads else other)(x, offset))
        return own(part, x, mask, cache)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("op")
@pytest.mark.parametrize(
    "otherwise", [None, scaled, unmasked, sinking, masking, half_turned, unturned_keys, keys_turned_otherwise]
)
def test_models_that_do_otherwise_stay_as_they_were(monkeypatch: pytest.MonkeyPatch, otherwise: Any) -> None:
    arguments = llama.ModelArgs("llama", 64, 2, 64, 4, 1e-5, 131, num_key_value_heads=2, rope_theta=1e4)
    model, own = llama.Model(arguments), llama.Attention.__call__
    ours.hook_attention(model)
    if otherwise is not None:
        monkeypatch.setattr(
            llama.Attention, "__call__", lambda part, x, mask, cache: otherwise(own, part, x, cache, mask)
        )
    assert rotary.turns_late(model, Trunk(model), 2) == (otherwise is None)
    if otherwise is not None:
        assert {type(layer.self_attn.rope) for layer in model.layers} == {nn.RoPE}


@pytest.mark.usefixtures("op")
def test_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "IN_PLACE", False)
    assert not late(opened(OF["llama"], tmp_path / "one"))
    monkeypatch.setenv(rotary.ASKED, "1")
    assert late(opened(OF["llama"], tmp_path / "other"))


def test_a_shortage_ends_its_requests_and_no_others(
    loaded: Loaded, op: InPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in place that was not computed, or not to its end: its rows are lost, others go on."""
    talk, rng, own = Conversation(Planned(loaded.runner, overlap=True)), np.random.default_rng(8), mx.async_eval
    prompts = {name: rng.integers(3, 131, 20).tolist() for name in "ab"}
    talk.submit("a", prompts["a"], 30)
    for _ in range(8):
        talk.step()
    assert op.calls

    monkeypatch.setattr(mx, "async_eval", no_memory)
    talk.step()
    monkeypatch.setattr(mx, "async_eval", own)
    talk.submit("b", prompts["b"], 30)
    talk.submit("again", [*prompts["a"], *talk.tokens["a"][:2]], 20)
    talk.finish()
    assert talk.finishes == {"a": "no_memory", "b": "length", "again": "length"}
    assert talk.tokens["b"] == loaded.plain(prompts["b"], 30)
    assert talk.tokens["again"] == loaded.plain([*prompts["a"], *talk.tokens["a"][:2]], 20)
