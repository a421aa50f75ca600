"""Recurrent states on the CPU: the conformance suite on a hybrid canary, with and without graphs; traffic; padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.opening import open_runner, plan_memory
from localllm.backends.pytorch.states import States
from localllm.engine.batch import Want
from localllm.engine.errors import ModelTooLarge
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.files.recurrent_config import StateShapes
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import Runner, RunnerSpec, page_bytes
from localllm.kernels.ops.layer import Layer

from . import canary, hybrid_canary
from .batches import Row, make_batch
from .conformance import BUDGET, Conformance, Conversation
from .tape import Tape
from .tiny import VOCAB, Tiny
from .traffic import Traffic

slow = pytest.mark.slow
GIB = 2**30
# A capture in segments needs layers that are composed of ops.
TAPED = replace(DEVICE, recorder=Tape, ops=replace(DEVICE.ops, layer=Layer()))
STATE_BYTES = 4 * (32 * 32 + 3 * 96)
assert BUDGET.cache_bytes is not None
STATEFUL = replace(BUDGET, cache_bytes=BUDGET.cache_bytes + 2 * BUDGET.max_rows * STATE_BYTES)


class Hybrid(Conformance):
    backend = "cpu"
    same_bits = False
    graphs: Graphs = "off"
    device = DEVICE
    save_adapter = staticmethod(hybrid_canary.save_adapter)
    # A hit ends at a snapshot, not at a page; test_prefix_hit_restores_the_state is in its place.
    test_prefix_hit_equals_cold_run = None  # type: ignore[assignment]

    @staticmethod
    def walk(prompt: Sequence[int], count: int) -> list[int]:
        return hybrid_canary.walk(prompt, count)

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        options = replace(STATEFUL, graphs=cls.graphs, compiler="eager", max_step_tokens=64)
        return opened(tmp_path_factory.mktemp("canary"), options, cls.device)

    @pytest.fixture
    def spec(self, runner: Runner) -> RunnerSpec:
        pytest.skip("the rows of these steps have no states")


def opened(folder: Path, options: LoadOptions, device: Device = DEVICE) -> Runner:
    return open_runner(read_model(hybrid_canary.save(folder)), options, device, GIB)


class TestStates(Hybrid):
    def test_the_plan_counts_states(self, runner: Runner) -> None:
        spec = runner.spec
        assert (spec.num_states, spec.num_snapshots, spec.snapshot_interval) == (12, 12, 16)
        assert spec.groups[0].num_pages == 120


@slow
class TestFull(Hybrid):
    graphs = "full"
    device = TAPED


@slow
class TestBreakable(Hybrid):
    graphs = "breakable"
    device = TAPED


@slow
class TestSplit(Hybrid):
    graphs = "split"
    device = TAPED


TIGHT = replace(STATEFUL, max_rows=6, max_step_tokens=32, context=128)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    ("graphs", "count"), [("off", 40), pytest.param("off", 500, marks=slow), pytest.param("breakable", 500, marks=slow)]
)
def test_requests_come_and_go(tmp_path: Path, overlap: bool, graphs: Graphs, count: int) -> None:
    """Joins, leaves, cancels, hits at snapshots and preemptions, also with an adapter: no wrong token, no lost slot."""
    device = DEVICE if graphs == "off" else TAPED
    pages = 30 * page_bytes(8, 1, 64, 1, 4)
    options = replace(TIGHT, graphs=graphs, cache_bytes=pages + 2 * TIGHT.max_rows * STATE_BYTES)
    runner = opened(tmp_path, options, device)
    assert runner.spec.num_states == 6
    traffic = Traffic(count, hybrid_canary.adapter(tmp_path / "adapter"), seed=5 + overlap, walk=hybrid_canary.walk)
    traffic.check(runner, overlap=overlap)
    runner.close()


def test_padding_rows_write_no_state(tmp_path: Path) -> None:
    """A replay of 3 rows with a graph of 4 leaves the other slots and the snapshots as they are."""
    graphs = opened(tmp_path, replace(STATEFUL, graphs="full"), TAPED)
    assert isinstance(graphs, GraphRunner)
    states = graphs._inner.kv.states
    assert states is not None
    prompts = [canary.prompt(key, 30, seed=key) for key in range(3)]
    rows = [Row(prompt, 0, range(1 + 8 * at, 9 + 8 * at), state=3 * at) for at, prompt in enumerate(prompts)]
    graphs.run(make_batch(rows, canary.VOCAB)).result()
    others = [slot for slot in range(states.scan.shape[1]) if slot not in (0, 3, 6)]
    before = states.scan[:, others].clone(), states.conv[:, others].clone()
    decode = [Row(hybrid_canary.walk(row.tokens, 1), 30, row.pages, state=row.state) for row in rows]
    drawn = graphs.run(make_batch(decode, canary.VOCAB)).result().tokens.tolist()
    assert drawn == [hybrid_canary.walk(prompt, 2)[1] for prompt in prompts]
    for part, values in zip((states.scan, states.conv), before, strict=True):
        torch.testing.assert_close(part[:, others], values, rtol=0, atol=0, equal_nan=True)


def test_copies_are_read_before_any_is_written() -> None:
    """A chain: a snapshot of a slot, whose next sequence begins with another snapshot."""
    states = States(StateShapes((3, 4), (2, 5, 6)), layers=2, entries=6, device="cpu")
    for part in (states.conv, states.scan):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    before = states.conv.clone(), states.scan.clone()
    states.copy(np.array([[0, 4], [5, 0], [1, 2]], np.int32), DEVICE)
    for part, old in zip((states.conv, states.scan), before, strict=True):
        assert part[:, [4, 0, 2]].equal(old[:, [0, 5, 1]])
        assert part[:, [1, 3, 5]].equal(old[:, [1, 3, 5]])


def test_short_memory_has_fewer_states(tmp_path: Path) -> None:
    """One sequence of the context fits first, then more states. The others wait."""
    pages = 256 // 8 * page_bytes(8, 1, 64, 1, 4)
    runner = opened(tmp_path, replace(BUDGET, cache_bytes=pages + 4 * STATE_BYTES))
    spec = runner.spec
    assert (spec.max_context, spec.num_states, spec.max_rows) == (256, 1, 12)
    assert spec.num_snapshots in (1, 2, 3)
    assert spec.cache_bytes <= pages + 4 * STATE_BYTES
    talk = Conversation(runner)
    prompts = {str(key): canary.prompt(key, 40, seed=key) for key in range(3)}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 20)
    assert talk.finish() == {name: hybrid_canary.walk(prompt, 20) for name, prompt in prompts.items()}
    with pytest.raises(ModelTooLarge, match="KV cache"):
        opened(tmp_path, replace(BUDGET, cache_bytes=STATE_BYTES))


def test_fit_counts_states(tmp_path: Path) -> None:
    files = read_model(hybrid_canary.save(tmp_path))
    plan = plan_memory(files, replace(BUDGET, cache_bytes=None), DEVICE, GIB)
    page = page_bytes(8, 1, 64, 1, 4)
    assert plan.state_bytes == STATE_BYTES
    assert plan.cache_bytes(256, parallel=3) == 3 * (32 * page + 2 * STATE_BYTES)
    assert plan.planned_cache == plan.num_pages * page + (plan.num_states + plan.num_snapshots) * STATE_BYTES
    assert (plan.num_states, plan.num_snapshots) == (12, 64)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "rms_norm_eps": 0.05,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
PROMPT = np.random.default_rng(1).integers(3, VOCAB, 40).tolist()
BYTES = LoadOptions(cache_bytes=2**22, max_rows=2)


def last_hidden(folder: Path, options: LoadOptions) -> torch.Tensor:
    """The hidden state of the last token of PROMPT."""
    runner = open_runner(read_model(folder), options, DEVICE, GIB)
    row = Row(PROMPT, 0, range(1, 9), want=Want.HIDDEN, state=0)
    result = runner.run(make_batch([row], VOCAB)).result()
    assert result.hidden is not None
    return torch.from_numpy(result.hidden[0])


# Gated norms and normalised keys multiply the errors of random weights.
@pytest.mark.parametrize(("quant", "bound"), [("int8", 0.97), ("fp8", 0.95), ("int4", 0.7)])
def test_quantised_hybrid_is_near_its_floats(tmp_path: Path, quant: Quant, bound: float) -> None:
    Tiny("qwen3_5_text", "qwen3_5_text", SIZES).save(tmp_path)
    small = last_hidden(tmp_path, replace(BYTES, quant=quant))
    assert torch.cosine_similarity(small, last_hidden(tmp_path, BYTES), dim=0) > bound
