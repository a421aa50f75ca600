"""Split graphs on the CPU: a forward pass that is traced, cut at attention and compiled."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.graphs import cutting, opaque
from localllm.backends.pytorch.graphs.compiling import Compiler
from localllm.backends.pytorch.graphs.opaque import Model, Site, computing
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.graphs.split import SplitModel
from localllm.backends.pytorch.inputs import Step
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Batch, Want
from localllm.engine.errors import SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Rows
from localllm.kernels.ops.cases.moe import random_experts
from localllm.kernels.ops.layer import Layer
from localllm.kernels.ops.moe import Routed, Routing
from localllm.kernels.ops.projection import Product
from localllm.kernels.ops.state import StateRows
from localllm.kernels.ops.step import Places

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, Conformance, Conversation
from .tape import Tape
from .tiny import TINIES, VOCAB

# Without it, Inductor's first compilation in a process also compiles a test program for each ISA.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

TAPED = replace(DEVICE, recorder=Tape, ops=replace(DEVICE.ops, layer=Layer()))  # whole layers cannot be cut
SPLIT = replace(BUDGET, graphs="split", max_step_tokens=64)
EAGER = replace(SPLIT, compiler="eager")
KINDS = (  # models with layers of different kinds
    "llama",
    "qwen2",
    "qwen3-biases",
    "gemma3",
    "phi3",
    "glm4",
    "granite",
    "ministral3",
    "olmo2",
    "smollm3",
    "deepseek_v3-dense",
    "qwen2_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "granitemoehybrid-mamba",
)


def by_inductor(test: Any) -> Any:
    """Needs a C++ compiler; Inductor's imports give warnings."""
    compilers = "g++", "clang++", "c++"
    has_none = pytest.mark.skipif(not any(map(shutil.which, compilers)), reason=f"none of {', '.join(compilers)}")
    return pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")(has_none(test))


class TestSplit(Conformance):
    backend = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return open_runner(files, EAGER, TAPED, 2**30)

    def test_padding_is_inert_at_all_sizes(self, runner: Runner) -> None:
        """Number of tokens: equal to a size, one less, one more, and more than the largest size."""
        assert runner.spec.graph_tokens == (*range(4, 33, 4), 48, 64)
        for length in (26, 27, 28, 29, 31, 33, 63, 64, 65, 100):
            prompt = canary.prompt(1, length, seed=length)
            actual = runner.run(make_batch([Row(prompt, 0, range(1, 15))], canary.VOCAB)).result()
            assert actual.tokens.tolist() == canary.walk(prompt, 1)


@by_inductor
@pytest.mark.slow
@pytest.mark.timeout(300)  # a newer torch's first compilation also prepares its headers
class TestSplitByInductor(TestSplit):
    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        opened = open_runner(files, replace(SPLIT, compiled_dir=tmp_path_factory.mktemp("made")), TAPED, 2**30)
        yield opened
        assert isinstance(opened, GraphRunner)
        assert prompts(opened).compiler.late == 0, "one compilation was for every number of tokens"


def captured(tiny: str, folder: Path, budget: LoadOptions = EAGER) -> Runner:
    (actual,) = (one for one in TINIES if one.label == tiny)
    actual.save(folder)
    budget = replace(budget, context=64, cache_bytes=2**20)
    return open_runner(read_model(folder), budget, TAPED, 2**30)


def opened(tiny: str, folder: Path, budget: LoadOptions = EAGER) -> TorchRunner:
    """A runner without captures."""
    runner = captured(tiny, folder, budget)
    inner = runner._inner if isinstance(runner, GraphRunner) else runner
    assert isinstance(inner, TorchRunner)
    return inner


def prompts(runner: Runner) -> SplitModel:
    inner = runner._inner if isinstance(runner, GraphRunner) else runner
    assert isinstance(inner, TorchRunner)
    assert isinstance(inner.split, SplitModel)
    return inner.split


def prompt(tokens: int, samples: int = 2, start: int = 0, groups: int = 1) -> Step:
    """A step of one row in the first pages of `groups` cache groups; `start` is its first position."""
    at, end = torch.arange(start, start + tokens, dtype=torch.int32), start + tokens
    ends, context = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    table = torch.arange(1, 9, dtype=torch.int32)[None]
    rows = Rows(ends, context, table, (tokens,), (end,))
    drawn = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens))
    slots = at.long() + BUDGET.page_size
    others = tuple(Places(replace(rows, group=group), slots) for group in range(1, groups))
    states = StateRows(rows, torch.zeros(1, dtype=torch.int32))
    last = at[tokens - samples :] - start
    return Step(drawn.int(), at, slots, last, rows, other_places=others, state_rows=states)


@pytest.mark.parametrize("tiny", KINDS)
def test_segments_equal_the_model(tmp_path: Path, tiny: str) -> None:
    runner = opened(tiny, tmp_path)
    split, groups = prompts(runner), len(runner.kv.groups)
    layers = len(runner.kv.cache.layers) + len(runner.kv.cache.states)
    assert len(split.segments) == 2 * layers + 1
    attentions = [part.op is not None for part, _ in split.segments]
    assert attentions == [False, True] * layers + [False]
    most = 5 if runner.kv.states else 4  # there are pieces between a scan and an attention
    assert split.compiler.kinds <= most, "the pieces between two layers are alike"
    with torch.inference_mode():
        for tokens, samples in [(23, 5), (7, 1), (2, 0), (48, 2)]:
            step = prompt(tokens, samples, groups=groups)
            actual = split(step, TAPED.ops, runner.kv)
            assert actual.equal(runner.model(step, TAPED.ops, runner.kv))
        chunks, actual = (prompt(23, groups=groups), prompt(7, start=23, groups=groups)), []
        for model in (split, runner.model):  # the second chunk reads the keys and values that the first has stored
            runner.kv.clear()
            actual.append([model(step, TAPED.ops, runner.kv) for step in chunks])
        assert actual[0][1].equal(actual[1][1])


def test_values_are_freed_after_their_last_reader(tmp_path: Path) -> None:
    """If values were freed later, a prefill would need the memory of all layers."""
    split = prompts(opened("llama", tmp_path))
    parts = [part for part, _ in split.segments]
    values_left = {*split._constants, *split._inputs}
    for at, part in enumerate(parts):
        assert values_left.issuperset(part.inputs)
        values_left = (values_left | {*part.outputs}) - {*part.spent}
        later = {node for other in parts[at + 1 :] for node in other.inputs} | {split._hidden}
        assert values_left - {*split._constants, *split._inputs} == later & values_left - {
            *split._constants,
            *split._inputs,
        }
    assert values_left == {split._hidden}


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("tiny", ["llama", "qwen3_moe"])
def test_packed_weights_use_the_products_of_the_device(tmp_path: Path, quant: Quant, tiny: str) -> None:
    runner, step = opened(tiny, tmp_path, replace(EAGER, quant=quant)), prompt(23)
    with torch.inference_mode():
        actual = prompts(runner)(step, TAPED.ops, runner.kv)
        assert actual.equal(runner.model(step, TAPED.ops, runner.kv))


def at_random(random: np.random.Generator, tokens: int, vocab: int, groups: int) -> Batch:
    """A step of `tokens` tokens in at most three rows, which returns all hidden states."""
    drawn = random.integers(0, vocab, tokens).tolist()
    cuts = sorted({0, tokens, *random.integers(1, tokens, 2).tolist()})
    rows = [
        Row(drawn[start:stop], 0, range(1 + 8 * at, 9 + 8 * at), want=Want.HIDDEN, state=at)
        for at, (start, stop) in enumerate(pairwise(cuts))
    ]
    return make_batch(rows, vocab, groups=groups)


@pytest.mark.parametrize("tiny", KINDS)
def test_replays_equal_uncaptured_steps(tmp_path: Path, tiny: str) -> None:
    """All bits are equal at a captured size."""
    graphs, random = captured(tiny, tmp_path), np.random.default_rng(3)
    assert isinstance(graphs, GraphRunner)
    for _ in range(40):
        tokens = int(random.choice(graphs.spec.graph_tokens))
        batch = at_random(random, tokens, VOCAB, len(graphs.spec.groups))
        replayed, ran = (one.run(batch).result().hidden for one in (graphs, graphs._inner))
        assert np.array_equal(replayed, ran)


@by_inductor
@pytest.mark.slow
@pytest.mark.parametrize("tiny", ["qwen3-biases", "gemma3", "qwen2_moe"])
def test_inductor_equals_the_model(tmp_path: Path, tiny: str) -> None:
    """The segments are compiled once, for captures and for all later steps."""
    check_equal(opened(tiny, tmp_path, replace(SPLIT, compiled_dir=tmp_path / "compiled")))


def check_equal(runner: TorchRunner) -> None:
    """The compiled segments equal the model at several sizes, and are compiled once."""
    with torch.inference_mode():
        for tokens, samples in [(23, 5), (7, 1), (48, 0), (2, 2)]:
            step = prompt(tokens, samples)
            actual, expected = (model(step, TAPED.ops, runner.kv) for model in (runner.split, runner.model))
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    assert prompts(runner).compiler.late == 0


@pytest.fixture
def recompiles(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The loggers with messages: torch's log of recompilations, or localllm."""
    torch._logging.set_logs(recompiles=True)
    log = logging.getLogger("torch._dynamo.guards.__recompiles")
    log.addHandler(caplog.handler)
    yield lambda: [record.name for record in caplog.records]
    log.removeHandler(caplog.handler)
    torch._logging.set_logs()


@by_inductor
@pytest.mark.slow
def test_late_compilations_are_counted_and_logged(tmp_path: Path, recompiles: Callable[[], list[str]]) -> None:
    graph = cutting.traced(lambda x: (x + 1).cos(), torch.zeros(23))
    (part,) = cutting.cut(graph, lambda _: False, lambda node: node)
    compiler = Compiler("inductor", tmp_path)
    piece = compiler.compiled(part)
    for tokens in (23, 7, 190):
        x = torch.linspace(0, 1, tokens)
        torch.testing.assert_close(piece(x)[0], (x + 1).cos())
    assert (compiler.late, recompiles()) == (0, [])
    piece(torch.zeros(23, dtype=torch.float64))
    assert compiler.late == 1
    assert recompiles() == ["torch._dynamo.guards.__recompiles", "localllm.backends.pytorch.graphs.compiling"]


@by_inductor
def test_failed_compilation_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest size may run out of memory. The compilation for the next size then serves all later sizes."""
    graph = cutting.traced(lambda x: (x + 1).sin(), torch.zeros(23))
    (part,) = cutting.cut(graph, lambda _: False, lambda node: node)
    compiler = Compiler("inductor", tmp_path)
    piece, inductor = compiler.compiled(part), compiler._inductor

    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compiler, "_inductor", short)
    with pytest.raises(RuntimeError, match="out of memory"):
        piece(torch.zeros(190))
    monkeypatch.setattr(compiler, "_inductor", inductor)
    for tokens in (23, 7, 190):
        piece(torch.zeros(tokens))
    assert compiler.late == 0


@by_inductor
def test_step_reports_its_late_compilations(tmp_path: Path) -> None:
    talk = Conversation(opened("llama", tmp_path, replace(SPLIT, compiled_dir=tmp_path / "made")))
    split = prompts(talk.engine._runner)
    talk.submit("a", range(2, 30), 3)
    talk.finish()
    assert talk.engine.stats().late_compiles == 0
    for node, tensor in split._constants.items():  # norms of another kind than when they were compiled
        split._constants[node] = tensor.clone() if tensor.is_floating_point() else tensor
    talk.submit("b", range(30, 2, -1), 3)
    talk.finish()
    assert talk.engine.stats().late_compiles > 0


def test_step_counts_only_its_late_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = opened("llama", tmp_path)
    split = runner.split
    assert isinstance(split, SplitModel)
    compiler = split.compiler
    forward = SplitModel.__call__
    batch = make_batch([Row(list(range(2, 12)), 0, range(1, 3))], VOCAB)
    compiler.late = 3
    assert runner.run(batch).result().late_compiles == 0

    def late(*given: Any) -> torch.Tensor:
        compiler.late += 2
        return forward(*given)

    monkeypatch.setattr(SplitModel, "__call__", late)
    assert runner.run(batch).result().late_compiles == 2


@by_inductor
def test_compiled_code_is_cached_for_later_starts(tmp_path: Path) -> None:
    """The compiled code, and the code from the cache, equal the model."""
    budget = replace(SPLIT, compiled_dir=tmp_path / "compiled")
    counts = torch._dynamo.utils.counters

    def start() -> tuple[int, int]:
        """(segments from the cache, compiled segments)."""
        torch._dynamo.reset()
        torch._inductor.utils.clear_caches()
        counts.clear()
        check_equal(opened("llama", tmp_path / "model", budget))
        actual = counts["aot_autograd"]
        return actual["autograd_cache_hit"], actual["autograd_cache_miss"]

    first, again = start(), start()
    assert first[0] == 0
    assert again == (first[1], 0)
    assert any((tmp_path / "compiled").iterdir())


@by_inductor
def test_models_share_no_state(tmp_path: Path) -> None:
    """Two models are open at a time, each with its weights. A closed model leaves no references."""
    one, other = (opened(tiny, tmp_path / tiny, SPLIT) for tiny in ("llama", "qwen2"))
    step = prompt(23)
    with torch.inference_mode():
        for runner in (one, other, one):
            actual, expected = (model(step, TAPED.ops, runner.kv) for model in (runner.split, runner.model))
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
        del actual, expected
    site = prompts(one).segments[1][1]
    assert isinstance(site, Site)
    references = [weakref.ref(held) for held in (one.kv.keys, site.attended.key_pages, one.model, one.split)]
    one.close()
    del one, runner, site
    gc.collect()
    assert [held() for held in references] == [None] * 4
    with torch.inference_mode():
        other.split(step, TAPED.ops, other.kv)


def test_long_steps_are_not_captured(tmp_path: Path) -> None:
    canary.save(tmp_path)
    layer = 128 * (2 * (2 + 1) * 64 + 3 * 1280)  # weights that a token is multiplied with
    device = replace(TAPED, layer_work=layer * 31.0)
    assert open_runner(read_model(tmp_path), EAGER, device, 2**30).spec.graph_tokens == tuple(range(4, 29, 4))


def test_forward_that_reads_a_length_is_refused() -> None:
    with pytest.raises(SettingRefused, match="only 23 tokens, because of test_graphs_split") as refused:
        cutting.traced(lambda x: x.view(len(x), 1) + 1, torch.zeros(23))
    assert "breakable" in refused.value.hint


@pytest.mark.parametrize(("weight", "kinds"), [(torch.zeros(8), 1), (torch.zeros(1), 2), (torch.zeros(8).half(), 2)])
def test_segments_with_other_weight_dtypes_have_another_kind(weight: torch.Tensor, kinds: int) -> None:
    """With equal kinds, code for one layer would be compiled again for another layer during requests."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] + torch.zeros(8)
        for at, held in enumerate((torch.ones(8), weight, torch.ones(8))):
            out = torch.empty_like(x)
            opaque.attend(x, x, x, out, at)
            x = out * held
        return x

    graph = cutting.traced(forward, torch.zeros(23))
    parts = cutting.cut(graph, lambda node: node.target is opaque.attend, lambda node: node.args[3])
    _, first, second, _ = (part for part in parts if part.op is None)
    assert str(first.graph.code) == str(second.graph.code)
    assert len({first.kind, second.kind}) == kinds


def test_attention_without_readers_is_computed() -> None:
    """Attention writes the cache, so it must not be removed as dead code."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        opaque.attend(x.clone(), x, x, torch.empty_like(x), 0)
        return x + 1

    graph = cutting.traced(forward, torch.zeros(23))
    assert [node.target for node in graph.graph.nodes].count(opaque.attend) == 1
    written = {one.name for one in opaque.attend._schema.arguments if one.alias_info and one.alias_info.is_write}
    assert written == {"qkv", "out"}, "a device's append may write over its qkv"


def test_refusal_without_a_known_place(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = SimpleNamespace(sloc=SimpleNamespace(framework_loc=None))
    shapes = SimpleNamespace(replacements={"s0": 23}, guards=[guard])
    monkeypatch.setattr(cutting, "make_fx", lambda *_, **__: lambda *_: SimpleNamespace(shape_env=shapes))
    with pytest.raises(SettingRefused, match=r"only 23 tokens$"):
        cutting.traced(lambda x: x, torch.zeros(23))


def test_products_belong_to_the_current_model() -> None:
    x, weight = torch.ones(1, 4), torch.ones(2, 4)
    one, other = (Model({weight.data_ptr(): Product("dense", weight * times)}, Ops()) for times in (1, 2))

    def actual() -> float:
        return float(opaque.product(x, weight, 2, torch.float32)[0, 0])

    with computing(one):
        with computing(other):
            inner = actual()
        assert (inner, actual()) == (8.0, 4.0)
    with pytest.raises(LookupError):
        actual()


def test_opaque_ops_pass_opcheck() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(6, 3, 32, generator=generator), torch.randn(8, 32, generator=generator)
    products = defaultdict(lambda: Product("dense", weight))  # opcheck hands in copies
    with computing(Model(products, Ops())):
        torch.library.opcheck(opaque.product, (x, weight, 8, torch.float64))
        expected = torch.nn.functional.linear(x, weight)
        assert opaque.product(x, weight, 8, torch.float32).equal(expected)


@pytest.mark.parametrize("groups", [1, 4])
def test_opaque_router_and_experts_pass_opcheck(groups: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = random_experts("dense", 8, 32, 16, generator, torch.float32)
    known = defaultdict(lambda: weights)  # opcheck hands in copies
    x, logits = torch.randn(6, 32, generator=generator), torch.randn(6, 8, generator=generator)
    routing = Routing(2, "sigmoid", True, 2.5, groups, min(groups, 2), "top2")
    correction = torch.randn(8, generator=generator)
    with computing(Model({}, Ops(), known)):
        torch.library.opcheck(opaque.route, (logits, correction, *routing))
        torch.library.opcheck(opaque.route, (logits, None, *routing))
        chosen = Routed(*opaque.route(logits, correction, *routing))
        torch.library.opcheck(opaque.experts, (x, *chosen, weights.gate_up))
        assert opaque.experts(x, *chosen, weights.gate_up).equal(Ops().moe.experts(x, chosen, weights))
