"""Models whose layers with a sliding window have a cache group of their own: the window's pages are used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.backends import cpu
from localllm.backends.cpu.device import DEVICE
from localllm.backends.cuda.device import DEVICE as CUDA
from localllm.backends.pytorch.device import Device
from localllm.backends.pytorch.memory_plan import measure, plan
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.files.model_config import ModelConfig, parse_config
from localllm.engine.files.model_files import read_model
from localllm.engine.kv import KVCache
from localllm.engine.options import Graphs, LoadOptions
from localllm.engine.runner import CacheGroup, Runner, RunnerSpec, page_bytes
from localllm.kernels.ops import Ops
from localllm.kernels.ops.layer import Layer

from . import canary
from .batches import Row, make_batch
from .conformance import BUDGET, PAGE, Conformance, Conversation, Planned
from .tape import Tape
from .tiny import TINIES, VOCAB, Tiny
from .traffic import Traffic

slow = pytest.mark.slow

WIDE = replace(BUDGET, cache_bytes=2 * 120 * page_bytes(PAGE, 1, 64, 1, 4))
TIGHT = replace(WIDE, max_rows=6, max_step_tokens=32, context=128)
# A capture in segments needs layers that are composed of ops.
TAPED = replace(DEVICE, recorder=Tape, ops=replace(DEVICE.ops, layer=Layer()))
GIB = 2**30


def opened(folder: Path, options: LoadOptions, device: Device = DEVICE) -> Runner:
    return open_runner(read_model(canary.save_windowed(folder)), options, device, GIB)


class Windowed(Conformance):
    backend = "cpu"
    graphs: Graphs = "off"
    device = DEVICE

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        options = replace(WIDE, graphs=cls.graphs, compiler="eager")
        return opened(tmp_path_factory.mktemp("canary"), options, cls.device)

    def test_window_needs_no_memory_for_what_it_has_passed(self, planned: Runner) -> None:
        full, window = planned.spec.groups
        groups = full, replace(window, num_pages=21)
        planned.spec = replace(planned.spec, max_tokens=32, groups=groups)  # type: ignore[misc]
        super().test_window_needs_no_memory_for_what_it_has_passed(planned)


class TestWindows(Windowed):
    def test_window_has_a_group(self, spec: RunnerSpec) -> None:
        full, window = spec.groups
        assert (full.window, window.window) == (0, canary.BACK + 1)
        assert window.num_pages < full.num_pages


@slow
class TestFull(Windowed):
    graphs = "full"
    device = TAPED


@slow
class TestBreakable(Windowed):
    graphs = "breakable"
    device = TAPED


@slow
class TestSplit(Windowed):
    graphs = "split"
    device = TAPED


def test_a_window_that_is_too_narrow_is_noticed(tmp_path: Path) -> None:
    """The canary reads the oldest position of its window."""
    runner = open_runner(read_model(canary.save_windowed(tmp_path, canary.BACK)), WIDE, DEVICE, GIB)
    talk = Conversation(runner)
    prompt = canary.prompt(1, 40, seed=1)
    talk.submit("a", prompt, 20)
    assert talk.finish()["a"] != canary.walk(prompt, 20)


def test_int8_caches_of_one_and_two_groups_have_equal_answers(tmp_path: Path) -> None:
    """Pages of the window are used again, with their scales."""
    device = replace(DEVICE, ops=Ops(), dtype=torch.bfloat16, int8_cache=True)
    answers = []
    for step_tokens in (16, 2**15):  # with so many tokens of a step, a group of the window saves nothing
        options = replace(WIDE, cache_dtype="int8", max_rows=1, max_step_tokens=step_tokens)
        runner = opened(tmp_path, options, device)
        planned = Planned(runner, overlap=True)
        planned.spec = replace(planned.spec, max_tokens=16)
        talk = Conversation(planned)
        for name, length in (("first", 90), ("hit", 60)):
            talk.submit(name, canary.prompt(1, 90, seed=1)[:length], 40)
        answers.append((len(runner.spec.groups), talk.finish()))
    assert [count for count, _ in answers] == [2, 1]
    assert answers[0][1] == answers[1][1]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=slow), True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    ("graphs", "count"),
    [
        ("off", 60),
        ("full", 60),
        ("breakable", 60),
        pytest.param("off", 500, marks=slow),
        pytest.param("full", 500, marks=slow),
        pytest.param("breakable", 150, marks=slow),
        pytest.param("split", 150, marks=slow),
    ],
)
def test_requests_come_and_go(tmp_path: Path, overlap: bool, graphs: Graphs, count: int) -> None:
    """Joins, leaves, cancels, prefix hits and preemptions, also with an adapter: no wrong token, no lost page."""
    device = DEVICE if graphs == "off" else TAPED
    options = replace(TIGHT, graphs=graphs, compiler="eager", cache_bytes=WIDE.cache_bytes // 4)
    runner = opened(tmp_path, options, device)
    Traffic(count, canary.adapter(tmp_path / "adapter"), seed=5 + overlap).check(runner, overlap=overlap)
    runner.close()


WINDOW_TINIES = [
    tiny for tiny in TINIES if tiny.label.endswith("-window") or tiny.label in ("gemma2", "gemma3", "gpt_oss")
]


class Leased:
    """Computes sequences on a runner, with the pages of the engine's cache."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._kv = KVCache(runner.spec)

    @torch.inference_mode()
    def logits(self, tokens: list[int], chunk: int) -> tuple[int, Tensor]:
        """(number of cached positions, logits of the other tokens [tokens, vocab]), in steps of `chunk` tokens."""
        runner = self._runner
        lease = self._kv.open(None, tokens)
        assert lease is not None
        computed = cached = lease.cached
        logits = []
        while computed < len(tokens):
            end = min(computed + chunk, len(tokens))
            assert self._kv.grow(lease, end)
            copies, _ = self._kv.take_copies()
            batch = make_batch([Row(tokens[computed:end], computed, [0])], VOCAB, groups=len(lease.pages))
            tables = tuple(np.array(pages, np.int32).reshape(1, -1) for pages in lease.pages)
            pairs = tuple(np.array(pairs, np.int32).reshape(-1, 2) for pairs in copies)
            batch = replace(batch, page_tables=tables, page_copies=pairs)
            runner.kv.copy(batch.page_copies, runner.device)
            step = runner.inputs.send(batch).step
            every = replace(step, last=torch.arange(batch.num_tokens, dtype=torch.int32))
            hidden = runner.model(every, runner.device.ops, runner.kv)
            logits.append(runner.model.logits(hidden, runner.device.ops))
            self._kv.share(lease, tokens, end)
            computed = end
        self._kv.close(lease)
        return cached, torch.cat(logits)


@pytest.mark.real
@pytest.mark.parametrize("tiny", WINDOW_TINIES, ids=str)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=slow), 5, pytest.param(16, marks=slow)])
def test_logits_equal_transformers_after_hits_at_the_window(tmp_path: Path, tiny: Tiny, chunk: int) -> None:
    """A sequence is computed, then others that share its first tokens: about a window, or four windows. The window has
    passed most of the first sequence, so its pages are used again."""
    model = tiny.save(tmp_path)
    options = LoadOptions(context=64, cache_bytes=2**22, max_rows=1, max_step_tokens=16, page_size=4, threads=1)
    runner = cpu.open(read_model(tmp_path), options)
    assert isinstance(runner, TorchRunner)
    window = runner.spec.groups[-1].window
    assert runner.spec.groups[-1].tokens < 45 + chunk < 64 or runner.spec.groups[-1].tokens < 64
    leased = Leased(runner)
    generator = torch.Generator().manual_seed(4)
    first, other = torch.randint(3, VOCAB, (2, 45), generator=generator).tolist()
    hits = 0
    for length in (45, window - 1, window, window + 1, 4 * window, 45, 44):
        tokens = [*first[:length], *other[: 60 - length]]
        with torch.inference_mode():
            right = model(torch.tensor([tokens])).logits[0]
        cached, logits = leased.logits(tokens, chunk)
        torch.testing.assert_close(logits, right[cached:], rtol=0, atol=1e-4)
        hits += cached > 0
    assert hits > 0


@pytest.mark.parametrize("chunk", [1, 7, 25, 64])
@pytest.mark.parametrize("length", [24, 25, 26, 100])
def test_hits_are_exact_at_the_window(tmp_path: Path, length: int, chunk: int) -> None:
    """Prefixes of W - 1, W, W + 1 and 4 W positions are hits where the cache has the window before them."""
    window = 25
    runner = open_runner(read_model(canary.save_windowed(tmp_path, window)), TIGHT, DEVICE, GIB)
    planned = Planned(runner, overlap=True)
    planned.spec = replace(planned.spec, max_tokens=chunk)
    talk = Conversation(planned)
    first, second = canary.prompt(1, 110, seed=1), canary.prompt(0, 60, seed=2)
    prompts = {"first": first[:length], "longer": first, "other": [*first[:length], *second[1 : 125 - length - 8]]}
    for name, prompt in prompts.items():
        talk.submit(name, prompt, 8)
        assert talk.finish()[name] == canary.walk(prompt, 8)
    assert talk.cached["longer"] >= (length - 1) // PAGE * PAGE, "the first request ended here"


# Published shapes: their caches, not their weights.
GEMMA3_27B = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131_072,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
}
CONTEXT = 131_072


def needed_bytes(config: ModelConfig) -> int:
    """Bytes of the bfloat16 keys and values that the next token of a sequence of CONTEXT positions reads."""
    positions = [CONTEXT if kind == "full" else config.window for kind in config.layer_kinds]
    return 2 * config.num_kv_heads * config.head_dim * 2 * sum(positions)


@pytest.mark.parametrize("config", [GEMMA3_27B, GPT_OSS_20B], ids=["gemma3-27b", "gpt-oss-20b"])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("device", [DEVICE, CUDA], ids=["cpu", "cuda"])
def test_cache_of_a_long_context_is_little_more_than_the_windows_need(
    config: dict[str, Any], rows: int, device: Device
) -> None:
    """128k positions fit in 1.15 times the keys and values that the layers read, with any number of rows."""
    parsed = parse_config(config)
    files: Any = SimpleNamespace(config=parsed, name="model", warnings=())
    needed = needed_bytes(parsed)
    plain = replace(device, meter=None)
    options = LoadOptions(context=CONTEXT, max_rows=rows, cache_bytes=int(1.15 * needed))
    memory = measure(files, options, 200 * GIB, torch.bfloat16, GIB, plain)
    assert needed < memory.cache_bytes(CONTEXT) < 1.15 * needed
    assert memory.fits(CONTEXT)
    assert memory.largest_context() == CONTEXT
    spec = plan(files, options, 200 * GIB, torch.bfloat16, GIB, plain)
    assert spec.max_context == CONTEXT
    assert needed < spec.cache_bytes <= 1.15 * needed
    KVCache(spec)  # checks that the window's pages suffice for one sequence


def test_windows_of_all_rows_fit_if_memory_is_not_short() -> None:
    parsed = parse_config(GPT_OSS_20B)
    files: Any = SimpleNamespace(config=parsed, name="model", warnings=())
    spec = plan(files, LoadOptions(max_rows=20), 200 * GIB, torch.bfloat16, GIB, replace(CUDA, meter=None))
    full, window = spec.groups
    assert full.tokens == 20 * CONTEXT
    assert window.tokens >= 20 * (128 + 2 * 16)
    assert spec.cache_tokens == 20 * CONTEXT


def groups_of(config: dict[str, Any], **options: Any) -> Sequence[CacheGroup]:
    files: Any = SimpleNamespace(config=parse_config(config), name="model", warnings=())
    return plan(files, LoadOptions(**options), 200 * GIB, torch.bfloat16, GIB, DEVICE).groups


def test_models_with_windows_only_have_one_group() -> None:
    everywhere = GEMMA3_27B | {"layer_types": ["sliding_attention"] * 62}
    [group] = groups_of(everywhere, context=CONTEXT, max_rows=2)
    assert group.window == 1024
    assert group.tokens < 2 * 1024 + 1024
    [group] = groups_of(everywhere, context=1024, max_rows=2)
    assert group.window == 0, "a window of the whole context frees nothing"


def test_window_that_frees_no_page_has_no_group() -> None:
    assert len(groups_of(GPT_OSS_20B, context=256, max_rows=4)) == 1
