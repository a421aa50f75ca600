"""Captured steps on the CPU, with a tape in place of GPU graphs: the conformance suite and tests of the replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.backends.cpu.device import DEVICE
from localllm.backends.pytorch.device import Captured, Device
from localllm.backends.pytorch.graphs.breakable import BreakableReplay, BreakOutputs, Segments
from localllm.backends.pytorch.graphs.full import FullReplay
from localllm.backends.pytorch.graphs.runner import GraphRunner
from localllm.backends.pytorch.inputs import Inputs
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.batch import Ints, Want
from localllm.engine.errors import SettingRefused
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.request import Sampling
from localllm.engine.runner import Runner
from localllm.kernels.ops import Ops
from localllm.kernels.ops.attention import Attend, Attention, Rows, paged_attention
from localllm.kernels.ops.layer import Layer

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, LENGTH, Conformance, Conversation, Planned, check_crowd, crowd
from .shapes import SHAPES
from .tape import Tape
from .teacher import difference, expected
from .tiny import TINIES

TAPED = replace(DEVICE, recorder=Tape)


class TestTaped(Conformance):
    backend = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return open_runner(files, BUDGET, TAPED, 2**30)

    def test_decode_steps_are_replayed(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(runner, GraphRunner)
        assert runner.spec.graph_rows == (1, 2, 4, 8, 12)
        ran: list[int] = []
        inner = runner._inner
        monkeypatch.setattr(inner, "run", lambda batch: ran.append(batch.num_tokens))
        prompt = canary.prompt(1, 30, seed=1)
        runner.run(make_batch([Row(prompt, 0, range(1, 5))], canary.VOCAB))
        assert ran == [30]
        runner.run(make_batch([Row([5], 30, range(1, 5)), *[Row([6], 0, [9 + at]) for at in range(4)]], canary.VOCAB))
        assert ran == [30], "a decode step of 5 rows is replayed with 8"


def test_the_first_adapter_is_loaded_while_others_decode(tmp_path: Path) -> None:
    """The load captures steps. The tokens of the step in flight must survive the capture."""
    runner = open_runner(read_model(canary.save(tmp_path)), BUDGET, TAPED, 2**30)
    talk = Conversation(Planned(runner, overlap=True))
    prompts = [canary.prompt(key, LENGTH, seed=key) for key in range(3)]
    for number, prompt in enumerate(prompts):
        talk.submit(f"base-{number}", prompt, 40)
    for _ in range(6):
        talk.step()
    folder = canary.save_adapter(tmp_path / "adapter", 2)
    adapter = Adapter("adapter", str(folder), read_adapter(folder).version)
    talk.engine.register_adapter(adapter)
    talk.submit("adapted", prompts[0], 40, adapter=adapter)
    expected = {f"base-{number}": canary.walk(prompt, 40) for number, prompt in enumerate(prompts)}
    expected["adapted"] = canary.walk(canary.under(prompts[0], 2), 40)
    assert talk.finish() == expected
    runner.close()


# A kernel that gets the context lengths as host numbers, as on an NPU.
@torch.library.custom_op("localllm_test::attend", mutates_args=())
def attend_on_host(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, contexts: list[int], scale: float
) -> Tensor:
    lens = torch.tensor(contexts, dtype=torch.int32)
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    rows = Rows(starts, lens, table, (1,) * len(contexts), tuple(contexts))
    return paged_attention(query, rows, Attend(keys, values, scale))


def attention_on_host(query: Tensor, rows: Rows, attend: Attend, out: Tensor | None = None) -> Tensor:
    if max(rows.query_lens) > 1:
        return paged_attention(query, rows, attend, out)
    result: Tensor = torch.ops.localllm_test.attend(
        query, attend.key_pages, attend.value_pages, rows.page_table, list(rows.contexts), attend.scale
    )
    return result


class HostTape(Tape):
    """A recorder whose replays update the host numbers of attention."""

    def updated(self, func: Callable[..., Any], args: tuple[Any, ...], contexts: Ints) -> tuple[Any, ...]:
        if func is not torch.ops.localllm_test.attend.default:
            return args
        padding = [1] * (len(args[4]) - len(contexts))
        return *args[:4], [*contexts.tolist(), *padding], *args[5:]


class StaleTape(HostTape):
    """A recorder whose replays have the host numbers of an earlier step."""

    first: Ints | None = None

    def updated(self, func: Callable[..., Any], args: tuple[Any, ...], contexts: Ints) -> tuple[Any, ...]:
        if self.first is None or len(self.first) != len(contexts):
            self.first = contexts
        return super().updated(func, args, self.first)


def with_host_numbers(recorder: type[Tape]) -> Device:
    ops = replace(DEVICE.ops, attention=Attention(paged=attention_on_host), layer=Layer())
    return replace(DEVICE, ops=ops, recorder=recorder)


class TestHostNumbers(Conformance):
    backend = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        return open_runner(files, BUDGET, with_host_numbers(HostTape), 2**30)


@pytest.mark.parametrize(("recorder", "is_right"), [(HostTape, True), (StaleTape, False)])
def test_stale_host_numbers_change_the_probabilities(recorder: type[Tape], is_right: bool, tmp_path: Path) -> None:
    shape = next(one for one in TINIES if one.label == "qwen3")
    logits = expected(shape, tmp_path)
    options = LoadOptions(dtype="float32", threads=1, cache_bytes=2**20, max_rows=4, max_step_tokens=16)
    errors, _ = difference(
        open_runner(read_model(tmp_path), options, with_host_numbers(recorder), 2**30), shape, logits
    )
    assert (errors.abs().max().item() < 1e-3) == is_right


class TestTapedInPieces(Conformance):
    backend = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        files = read_model(canary.save(tmp_path_factory.mktemp("canary")))
        # Whole layers leave no attention to break at.
        device = replace(TAPED, ops=replace(TAPED.ops, layer=Layer()))
        return open_runner(files, replace(BUDGET, graphs="breakable", max_step_tokens=64), device, 2**30)

    def test_prefills_are_replayed(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(runner, GraphRunner)
        assert runner.spec.graph_tokens == (*range(4, 33, 4), 48, 64)
        monkeypatch.setattr(runner._inner, "run", lambda batch: pytest.fail("not replayed"))
        for length in (26, 27, 28, 29, 31, 33, 63, 64):  # equal to captured sizes, and one token more or less
            prompt = canary.prompt(1, length, seed=length)
            actual = runner.run(make_batch([Row(prompt, 0, range(1, 9))], canary.VOCAB)).result()
            assert actual.tokens.tolist() == canary.walk(prompt, 1)


PLAIN = [
    Sampling(),
    Sampling(temperature=6.0, seed=1),
    Sampling(temperature=6.0, top_k=3, seed=2),
    Sampling(temperature=6.0, top_p=0.7, seed=3),
    Sampling(temperature=6.0, top_k=40, top_p=0.9, min_p=0.1, seed=4),
]
OTHERS = [
    replace(PLAIN[1], logprobs=2),
    Sampling(logit_bias=tuple((token, 12.0) for token in range(0, canary.VOCAB, 2))),
    replace(PLAIN[3], repetition_penalty=1.5),
]


@pytest.mark.parametrize("graphs", ["full", "off"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("samplings", [PLAIN, [*PLAIN, *OTHERS]], ids=["plain", "others"])
def test_replayed_draws_equal_solo_runs(
    tmp_path: Path, graphs: Graphs, overlap: bool, samplings: list[Sampling]
) -> None:
    """Draws within a capture and after a replay equal those of a runner without graphs for each request alone."""
    files = read_model(canary.save(tmp_path))
    prompts = [canary.prompt(at % canary.KEYS, 30 + at, seed=at) for at in range(len(samplings))]
    alone = {}
    for at, sampling in enumerate(samplings):
        talk = Conversation(open_runner(files, replace(BUDGET, graphs="off"), TAPED, 2**30))
        talk.submit(f"r{at}", prompts[at], 30, sampling)
        alone |= talk.finish()
    talk = Conversation(Planned(open_runner(files, replace(BUDGET, graphs=graphs), TAPED, 2**30), overlap=overlap))
    for at, sampling in enumerate(samplings):
        talk.submit(f"r{at}", prompts[at], 30, sampling)
    assert talk.finish() == alone


def test_rows_without_an_answer_do_not_change_other_rows(tmp_path: Path) -> None:
    """A prefill may end with a chunk of one token. The other rows draw their tokens after the replay."""
    runner = open_runner(read_model(canary.save(tmp_path)), BUDGET, TAPED, 2**30)
    assert isinstance(runner, GraphRunner)
    vocab = canary.VOCAB
    prompts = [canary.prompt(key, 30, seed=key) for key in range(3)]
    pages = [range(1 + 4 * key, 5 + 4 * key) for key in range(3)]
    tokens = [
        int(runner.run(make_batch([Row(prompt, 0, own)], vocab)).result().tokens[0])
        for prompt, own in zip(prompts, pages, strict=True)
    ]
    assert tokens == [canary.walk(prompt, 1)[0] for prompt in prompts]
    logprobs = Sampling(logprobs=1)
    decode = [Row([token], 30, own, sampling=logprobs) for token, own in zip(tokens, pages, strict=True)]
    decode[1].want = Want.NOTHING
    result = runner.run(make_batch(decode, vocab)).result()
    assert result.row_starts.tolist() == [0, 1, 1, 2]
    assert result.tokens.tolist() == [canary.walk(prompts[key], 2)[1] for key in (0, 2)]
    assert result.logprobs is not None
    assert len(result.logprobs) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_are_replayed(tmp_path: Path, overlap: bool) -> None:
    runner = open_runner(read_model(canary.save(tmp_path)), crowd(64), TAPED, 2**30)
    check_crowd(Planned(runner, overlap=overlap), 64)


@pytest.mark.parametrize("references", ["attention", "all"])
def test_replayed_references_use_the_rows_of_each_step(tmp_path: Path, references: str) -> None:
    """References compute shapes without a kernel, e.g. heads of 512. The warm-up before a capture has other rows."""
    files = read_model(canary.save(tmp_path))
    talk = Conversation(open_runner(files, replace(BUDGET, ops=(f"{references}=reference",)), TAPED, 2**30))
    prompts = {f"r{key}": canary.prompt(key, 25 + 7 * key, seed=key) for key in range(3)}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 30)
    assert talk.finish() == {name: canary.walk(prompt, 30) for name, prompt in prompts.items()}


class Strict(Tape):
    """Refuses ops whose first call is within a capture: a first call compiles and loads kernels."""

    recording = False

    def begin(self) -> None:
        super().begin()
        self.recording = True

    def end(self) -> Captured:
        self.recording = False
        return super().end()


def watched(ops: Ops, tape: Strict) -> Ops:
    """Ops whose calls the recorder checks."""

    def strict(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        called = False

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal called
            assert called or not tape.recording, f"{name} is called for the first time while it is recorded"
            called = True
            return op(*arguments, **named)

        return call

    families = {}
    for family in fields(ops):
        family_ops = getattr(ops, family.name)
        parts = {op.name: strict(f"{family.name}.{op.name}", getattr(family_ops, op.name)) for op in fields(family_ops)}
        families[family.name] = family_ops if family.name in ("layer", "linear") else replace(family_ops, **parts)
    return replace(ops, **families)


@pytest.mark.parametrize("graphs", ["full", "breakable"])
def test_captured_ops_were_called_before_the_capture(tmp_path: Path, graphs: Graphs) -> None:
    files = read_model(canary.save(tmp_path))
    plain = replace(TAPED, ops=replace(TAPED.ops, layer=Layer()))
    runner = open_runner(files, replace(BUDGET, graphs="off"), plain, 2**30)
    assert isinstance(runner, TorchRunner)
    tape = Strict()
    runner.device = replace(plain, ops=watched(plain.ops, tape))
    runner.inputs = Inputs(runner.spec, runner.device)
    if graphs == "full":
        FullReplay(runner, tape, 4)
    else:
        BreakableReplay(runner, tape, 16, BreakOutputs())
    assert not tape.recording


@pytest.mark.parametrize(
    "label",
    [
        "llama-d512-h2x1",
        "gemma3-d16-h8x4-w2-tie-ropes",
        "qwen2-d20-h4x4-w5-default",
        "deepseek_v3",
        "ministral3",
        "smollm3-window",
        "olmo2",
    ],
)
@pytest.mark.parametrize("graphs", ["full", "breakable", "split"])
def test_captured_references_support_odd_shapes(tmp_path: Path, label: str, graphs: Graphs) -> None:
    """The references compute them within a capture."""
    (shape,) = (one for one in (*SHAPES, *TINIES) if one.label == label)
    logits = expected(shape, tmp_path)
    budget = LoadOptions(
        cache_bytes=2**25, max_rows=4, max_step_tokens=128, page_size=8, graphs=graphs, compiler="eager"
    )
    device = replace(TAPED, ops=Ops())
    off, _ = difference(open_runner(read_model(tmp_path), budget, device, 2**30), shape, logits)
    assert off.abs().max() < 1e-4


def test_graphs_off_captures_nothing(tmp_path: Path) -> None:
    files = read_model(canary.save(tmp_path))
    assert open_runner(files, replace(BUDGET, graphs="off"), TAPED, 2**30).spec.graph_rows == ()


def test_fp8_cache_is_refused_if_unsupported(tmp_path: Path) -> None:
    files = read_model(canary.save(tmp_path))
    with pytest.raises(SettingRefused, match="fp8 is not supported on cpu"):
        open_runner(files, replace(BUDGET, cache_dtype="fp8"), TAPED, 2**30)
    with pytest.raises(SettingRefused, match="needs dtype bfloat16"):
        open_runner(files, replace(BUDGET, cache_dtype="fp8"), replace(TAPED, fp8_cache=True), 2**30)


def test_attention_outputs_are_shared_by_shape_and_dtype() -> None:
    answers = BreakOutputs()
    largest = answers.of(torch.ones(8, 2, 4)[:, :, :3].mT, 3, 2)
    assert (largest.shape, largest.is_contiguous(), largest.any().item()) == ((8, 3, 2), True, False)
    small = answers.of(torch.zeros(5, 3, 7), 3, 2)
    assert (small.shape, small.data_ptr()) == ((5, 3, 2), largest.data_ptr())
    for shape, dtype in (((8, 4, 2), torch.float32), ((8, 3, 4), torch.float32), ((8, 3, 2), torch.bfloat16)):
        other = answers.of(torch.zeros(shape, dtype=dtype), *shape[1:])
        assert (other.shape, other.dtype) == (shape, dtype)
        assert other.data_ptr() != largest.data_ptr()


def test_steps_without_attention_are_not_captured_in_segments() -> None:
    """An op that computes complete layers would be captured with the rows of the warm-up."""
    with pytest.raises(AssertionError, match="no attention to break at"):
        Segments(Tape(), BreakOutputs()).capture(lambda ops: torch.zeros(1), Ops())
