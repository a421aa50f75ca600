"""Long runs of the engine on real llama.cpp: no wrong token, and no growth of cells, sequences or memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from llama_cpp import llama_cpp

from localllm.backends import llamacpp
from localllm.backends.llamacpp import memory_plan, opening
from localllm.backends.llamacpp.opening import can_repack
from localllm.engine.engine import Engine
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Delta, Request, Sampling
from localllm.engine.runner import Runner

from . import canary
from .conformance import Planned
from .gguf_models import write_canary, write_canary_adapter
from .gguf_random import HEAD_DIM, HYBRID, KV_HEADS, LAYERS, RECURRENT, write_random
from .llama_decode import Reference, loaded

pytestmark = pytest.mark.real

# 32 pages of 8 cells: fewer than the requests need.
OPTIONS = LoadOptions(
    context=256, cache_bytes=256 * 2 * 64 * 2, max_rows=8, max_step_tokens=40, page_size=8, threads=1, adapter_slots=2
)


@dataclass
class Talk:
    """An engine with requests. The test calls each step."""

    engine: Engine
    deltas: dict[str, list[Delta]] = field(default_factory=dict)

    def submit(self, name: str, prompt: list[int], count: int, **more: Any) -> None:
        self.deltas[name] = []
        self.engine.submit(Request(name, tuple(prompt), count, **more))

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas[delta.request_id].append(delta)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.tokens]


def random_prompt(rng: np.random.Generator) -> list[int]:
    """One of a few beginnings, up to a random position, and then random symbols."""
    stem = canary.prompt(int(rng.integers(canary.KEYS)), 150, seed=int(rng.integers(2)))
    tail = rng.integers(0, canary.SYMBOLS, int(rng.integers(1, 12))).tolist()
    return [*stem[: int(rng.integers(canary.BACK + 2, 150))], *tail]


def run_operations(talk: Talk, count: int, adapters: list[Adapter], shifts: list[int], seed: int) -> None:
    """Random joins and cancels between the steps, of requests with and without adapters; then check all tokens."""
    rng = np.random.default_rng(seed)
    prompts: dict[str, list[int]] = {}
    expected: dict[str, list[int]] = {}
    while len(prompts) < count or talk.engine.has_work:
        if len(prompts) < count and rng.random() < 0.4:
            name = f"{seed}-{len(prompts)}"
            prompts[name] = random_prompt(rng)
            choice = int(rng.integers(-2, len(adapters)))
            shift = shifts[choice] if choice >= 0 else 0
            length = int(rng.integers(1, 60))
            talk.submit(name, prompts[name], length, adapter=adapters[choice] if choice >= 0 else None)
            expected[name] = canary.walk(canary.under(prompts[name], shift), length)
        if rng.random() < 0.05 and prompts:
            talk.engine.cancel(str(rng.choice(list(prompts))))
        talk.step()
    finished = 0
    for name, tokens in expected.items():
        actual = talk.tokens(name)
        assert actual == tokens[: len(actual)], name
        assert talk.deltas[name][-1].finish in ("length", "cancelled")
        finished += actual == tokens
    assert finished > count // 2


def used_sequences(runner: Runner) -> int:
    """The number of sequence ids that have cells."""
    memory = llama_cpp.llama_get_memory(runner._context)
    count = llama_cpp.llama_n_seq_max(runner._context)
    return sum(llama_cpp.llama_memory_seq_pos_max(memory, sequence) >= 0 for sequence in range(count))


def fill_cache(talk: Talk, runner: Runner, name: str) -> None:
    """A request that needs every cell."""
    prompt = canary.prompt(1, runner.spec.max_length - 20, seed=99)
    talk.submit(name, prompt, 20)
    talk.finish()
    assert talk.tokens(name) == canary.walk(prompt, 20)


@pytest.mark.parametrize(("layout", "overlap"), [("shared", False), ("rows", False), ("shared", True), ("rows", True)])
@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_requests_come_and_go(rounds: int, layout: Any, overlap: bool, tmp_path: Path) -> None:
    """Each round has 45 requests, and changes of the adapters: 12 rounds have more than 500 operations."""
    shifts = [1, 2, 3, 4]
    files = [write_canary_adapter(tmp_path / f"{shift}.gguf", shift) for shift in shifts]
    adapters = [Adapter(file.stem, str(file), read_adapter(file).version) for file in files]
    cache_bytes = OPTIONS.cache_bytes if layout == "shared" else None
    options = replace(OPTIONS, cache_layout=layout, cache_bytes=cache_bytes)
    runner = llamacpp.open(read_model(write_canary(tmp_path)), options)
    assert runner.spec.max_length == 256
    talk = Talk(Engine(Planned(runner, overlap=overlap)))
    for adapter in adapters:
        talk.engine.register_adapter(adapter)
    sizes = []
    for seed in range(rounds):
        run_operations(talk, 45, adapters, shifts, seed)
        assert used_sequences(runner) <= runner.spec.max_paths
        fill_cache(talk, runner, f"all-{seed}")
        assert layout == "rows" or used_sequences(runner) == 1
        sizes.append(psutil.Process().memory_info().rss)
    stats = talk.engine.stats()
    assert (stats.preemptions > 0) == (layout == "shared")
    assert stats.prefix_hit_tokens > 0
    assert stats.cache_used == 0
    assert max(sizes[rounds // 2 :]) < max(sizes[: rounds // 2 + 1]) + 2**22
    talk.engine.close()
    runner.close()


def log_probability(logits: np.ndarray, token: int) -> float:
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


ATTENTION = ("gemma3", "gemma2", "llama", "phi3", "mpt")


@pytest.mark.parametrize(
    ("architecture", "layout", "overlap"),
    [
        ("gemma3", "shared", False),
        ("gemma3", "rows", True),
        ("mamba", "shared", False),
        ("falcon-h1", "shared", True),
        *[
            pytest.param(name, layout, overlap, marks=pytest.mark.slow)
            for name in ATTENTION[1:]
            for layout, overlap in (("shared", True), ("rows", False))
        ],
    ],
)
def test_random_models_give_the_log_probabilities_of_llama_cpp(
    architecture: str, layout: Any, overlap: bool, tmp_path: Path
) -> None:
    """Requests with common beginnings come and go. The context of gemma is eight times its window."""
    cell_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    has_states = architecture in RECURRENT | HYBRID
    file = write_random(tmp_path, architecture, "F16" if has_states else "F32")
    options = replace(OPTIONS, adapter_slots=0, cache_bytes=2**23 if has_states else 256 * cell_bytes)
    if layout == "rows":
        options = replace(options, cache_bytes=None, cache_layout=layout)
    runner = llamacpp.open(read_model(file), options)
    talk = Talk(Engine(Planned(runner, overlap=overlap)))
    rng = np.random.default_rng(0)
    stems = rng.integers(0, 200, (2, 120)).tolist()
    prompts: dict[str, list[int]] = {}
    while len(prompts) < 24 or talk.engine.has_work:
        if len(prompts) < 24 and rng.random() < 0.3:
            name = f"r{len(prompts)}"
            prompts[name] = [*stems[len(prompts) % 2][: int(rng.integers(1, 120))], int(rng.integers(0, 200))]
            talk.submit(name, prompts[name], int(rng.integers(1, 100)), sampling=Sampling(logprobs=0))
        talk.step()
    assert talk.engine.stats().prefix_hit_tokens > 0
    talk.engine.close()
    runner.close()
    with loaded(file, repack=can_repack(read_model(file))) as model:
        for name, prompt in prompts.items():
            tokens = talk.tokens(name)
            alone = Reference(model)
            logits = alone.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
            alone.close()
            expected = [log_probability(row, token) for row, token in zip(logits, tokens, strict=True)]
            actual = [each.logprob for delta in talk.deltas[name] for each in delta.logprobs]
            assert actual == pytest.approx(expected, abs=0.05), name
            assert talk.deltas[name][-1].finish == "length"


def test_architecture_with_one_sequence_computes_one_request_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp ends the process at a copy in the cache of such an architecture (deepseek4)."""
    for module in (memory_plan, opening):
        monkeypatch.setattr(module, "ONE_SEQUENCE", {"mamba"})
    file = write_random(tmp_path, "mamba", "F16")
    runner = llamacpp.open(read_model(file), replace(OPTIONS, adapter_slots=0, cache_bytes=2**23))
    assert llama_cpp.llama_n_seq_max(runner._context) == 1
    assert (runner.spec.max_rows, runner.spec.num_snapshots) == (1, 0)
    assert "one request at a time" in " ".join(runner.spec.warnings)
    talk = Talk(Engine(runner))
    prompt = np.random.default_rng(0).integers(0, 200, 70).tolist()
    for name in ("a", "b", "c"):
        talk.submit(name, prompt, 20)
    talk.finish()
    with loaded(file, repack=can_repack(read_model(file))) as model:
        alone = Reference(model)
        expected, _ = alone.generate(prompt, 20)
        alone.close()
    assert [talk.tokens(name) for name in ("a", "b", "c")] == [expected] * 3
    talk.engine.close()
