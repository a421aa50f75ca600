"""Greedy tokens that llama.cpp's graph chooses, beside those that the host chooses from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.backends import llamacpp
from localllm.backends.llamacpp.greedy import plain_answers
from localllm.backends.llamacpp.library import library
from localllm.backends.llamacpp.runner import LlamaRunner
from localllm.engine.batch import Batch, Want
from localllm.engine.errors import RunnerFailed
from localllm.engine.modelfiles import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Sampling

from . import canary, gguf_models, gguf_random
from .batches import Row, make_batch

pytestmark = pytest.mark.real

OPTIONS = LoadOptions(context=256, cache_bytes=2**22, max_rows=4, page_size=16, threads=1)
DEVICE = replace(OPTIONS, greedy_tokens="device")
VOCAB = gguf_random.VOCAB
PAGES = 16  # of each row
RANDOM = Sampling(temperature=1.0, seed=7)
OTHERS = [RANDOM, Sampling(logprobs=2), Sampling(logit_bias=((3, 9.0),)), Sampling(repetition_penalty=1.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., LlamaRunner]]:
    """Opens a model, and closes it after the test."""
    runners: list[LlamaRunner] = []

    def open_model(file: Path, options: LoadOptions) -> LlamaRunner:
        runner = llamacpp.open(read_model(file), options)
        assert isinstance(runner, LlamaRunner)
        runners.append(runner)
        return runner

    yield open_model
    for runner in runners:
        runner.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of outputs that are read from llama.cpp, in order."""
    names: list[str] = []
    c = library().c

    def note(name: str, call: Any) -> Any:
        return lambda *arguments: (names.append(name), call(*arguments))[1]

    for kind, name in (("token", "llama_get_sampled_token_ith"), ("logits", "llama_get_logits")):
        monkeypatch.setattr(c, name, note(kind, getattr(c, name)))
    return names


def random_row(rng: np.random.Generator, index: int, tokens: list[int], start: int) -> Row:
    """A row with any answer: a plain one, one that needs the logits, a hidden state, none."""
    want = Want(rng.choice(3, p=[0.1, 0.8, 0.1]))
    row = Row(tokens, start, range(1 + PAGES * index, 1 + PAGES * (index + 1)), want, prompt=[1, 2], output=tokens)
    if want == Want.TOKEN and rng.random() < 0.5:
        row.sampling = OTHERS[int(rng.integers(len(OTHERS)))]
        if rng.random() < 0.3:
            row.mask = rng.random(VOCAB) < 0.3
    return row


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma3"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_all_kinds_of_answers(
    folder: Path, opened: Callable[..., LlamaRunner], reads: list[str], architecture: str, seed: int
) -> None:
    """The kind of each row changes from step to step. gemma3 has a sliding window, and two ids for each sequence."""
    file = gguf_random.write_random(folder, architecture)
    host = opened(file, OPTIONS)
    device = opened(file, DEVICE)
    assert device.spec.warnings == host.spec.warnings
    assert device.spec.max_paths == host.spec.max_paths - 1, "one sequence is free, so that others can change their ids"
    rng = np.random.default_rng(seed)
    lengths = [0] * 4
    inputs = [rng.integers(0, VOCAB, int(count)).tolist() for count in rng.integers(1, 40, 4)]
    for _ in range(25):
        rows = [
            random_row(rng, index, inputs[index], lengths[index]) for index in rng.permutation(4)[: rng.integers(1, 5)]
        ]
        batch = make_batch(rows, VOCAB)
        expected = host.run(batch).result()
        reads.clear()
        actual = device.run(batch).result()
        plain = plain_answers(batch)
        assert reads.count("token") == plain.sum()
        drawn = batch.wants[batch.wants != Want.NOTHING] == Want.TOKEN
        assert ("logits" in reads) == bool((drawn & ~plain).any())
        assert actual.tokens[drawn].tolist() == expected.tokens[drawn].tolist()
        if expected.logprobs is not None:
            listed = batch.sampling.logprobs >= 0
            np.testing.assert_allclose(actual.logprobs[listed], expected.logprobs[listed], atol=1e-5)
        if expected.hidden is not None:
            np.testing.assert_allclose(actual.hidden[~drawn], expected.hidden[~drawn], atol=1e-4)
        answers = iter(expected.tokens.tolist())
        for row in rows:
            index = (row.pages[0] - 1) // PAGES
            lengths[index] += len(row.tokens)
            inputs[index] = [next(answers) if row.want != Want.NOTHING else 5]


def batch_of(sampling: Sampling, **row: Any) -> Batch:
    return make_batch([Row([1], 0, [1], sampling=sampling, **row)], VOCAB)


@pytest.mark.parametrize("sampling", OTHERS, ids=str)
def test_answers_that_need_their_logits_are_not_plain(sampling: Sampling) -> None:
    assert plain_answers(batch_of(Sampling())).tolist() == [True]
    assert plain_answers(batch_of(sampling, prompt=[1])).tolist() == [False]


def test_masked_answers_and_hidden_states_are_not_plain() -> None:
    assert plain_answers(batch_of(Sampling(), mask=np.ones(VOCAB))).tolist() == [False]
    assert plain_answers(batch_of(Sampling(), want=Want.HIDDEN)).tolist() == [False]
    assert plain_answers(batch_of(Sampling(), want=Want.NOTHING)).tolist() == []


def test_long_prompts_and_short_ones_in_one_step(
    tmp_path: Path, opened: Callable[..., LlamaRunner], reads: list[str]
) -> None:
    """llama.cpp divides the tokens of a long step into several parts, each of which has outputs."""
    runner = opened(gguf_models.write_canary(tmp_path), replace(DEVICE, context=512, max_step_tokens=2048))
    prompts = [canary.prompt(key, length, seed=key) for key, length in ((1, 400), (2, 30), (3, 460), (4, 25))]
    rows = [Row(prompt, 0, range(1 + 32 * index, 33 + 32 * index)) for index, prompt in enumerate(prompts)]
    rows[2].sampling = Sampling(logprobs=0)
    reads.clear()
    result = runner.run(make_batch(rows, canary.VOCAB)).result()
    assert result.tokens.tolist() == [canary.walk(prompt, 1)[0] for prompt in prompts]
    assert reads.count("token") == 3


def test_equal_logits(tmp_path: Path, opened: Callable[..., LlamaRunner]) -> None:
    """Among equal logits, the host chooses the first one, and the device any."""
    file = gguf_models.write_canary(tmp_path)
    for tensor in gguf.GGUFReader(file, "r+").tensors:
        if tensor.name == "output.weight":
            tensor.data[:] = 0
    batch = make_batch([Row(canary.prompt(1, 30, seed=1), 0, range(1, 9))], canary.VOCAB)
    assert opened(file, OPTIONS).run(batch).result().tokens.tolist() == [0]
    device = opened(file, DEVICE)
    assert not device.spec.warnings, "any of the equal logits is the right choice"
    [token] = device.run(batch).result().tokens.tolist()
    assert 0 <= token < canary.VOCAB


def test_steps_of_one_token(tmp_path: Path, opened: Callable[..., LlamaRunner]) -> None:
    """llama.cpp ends the process if a step has more tokens than the context allows, also at the test of the load."""
    runner = opened(gguf_models.write_canary(tmp_path), replace(DEVICE, max_rows=1, max_step_tokens=1))
    assert (runner.spec.max_tokens, runner.spec.warnings) == (1, ())
    prompt = canary.prompt(1, 30, seed=1)
    for position, token in enumerate(prompt):
        result = runner.run(make_batch([Row([token], position, range(1, 9))], canary.VOCAB)).result()
    assert result.tokens.tolist() == canary.walk(prompt, 1)


@pytest.mark.parametrize("wrong", [-1, 1, canary.VOCAB])
def test_host_chooses_if_the_graph_chooses_wrong_tokens(
    tmp_path: Path, opened: Callable[..., LlamaRunner], monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(library().c, "llama_get_sampled_token_ith", lambda context, index: wrong)
        runner = opened(gguf_models.write_canary(tmp_path), DEVICE)
    assert "does not choose the token with the largest logit" in runner.spec.warnings[-1]
    prompt = canary.prompt(1, 30, seed=1)
    result = runner.run(make_batch([Row(prompt, 0, range(1, 9))], canary.VOCAB)).result()
    assert result.tokens.tolist() == canary.walk(prompt, 1)


def test_host_chooses_if_the_probe_fails(
    tmp_path: Path, opened: Callable[..., LlamaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(library().c, "llama_decode", lambda context, batch: -1)
        runner = opened(gguf_models.write_canary(tmp_path), DEVICE)
    assert runner.spec.warnings


def test_host_chooses_if_a_function_is_missing(
    tmp_path: Path, opened: Callable[..., LlamaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(library().c, "llama_sampler_init_greedy")
    runner = opened(gguf_models.write_canary(tmp_path), DEVICE)
    assert runner.spec.warnings[-1].endswith("has no function llama_sampler_init_greedy")
    prompt = canary.prompt(1, 30, seed=1)
    result = runner.run(make_batch([Row(prompt, 0, range(1, 9))], canary.VOCAB)).result()
    assert result.tokens.tolist() == canary.walk(prompt, 1)


def test_logits_without_numbers_are_an_error(
    tmp_path: Path, opened: Callable[..., LlamaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml on a GPU chooses -1 then."""
    runner = opened(gguf_models.write_canary(tmp_path), DEVICE)
    step = runner.run(make_batch([Row(canary.prompt(1, 30, seed=1), 0, range(1, 9))], canary.VOCAB))
    with monkeypatch.context() as patched:
        patched.setattr(library().c, "llama_get_sampled_token_ith", lambda context, index: -1)
        with pytest.raises(RunnerFailed, match="chose no token"):
            step.result()


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("llama", {"cache_layout": "rows", "cache_bytes": None}, "cache_layout rows"),
        ("mamba", {}, "recurrent state"),
        ("gemma3", {"max_rows": 64}, "max_rows 64 needs 128 sequences, and llama.cpp has 64"),
    ],
)
def test_host_chooses_if_rows_cannot_change_their_sequence(
    folder: Path, opened: Callable[..., LlamaRunner], reads: list[str], architecture: str, change: Any, reason: str
) -> None:
    file = gguf_random.write_random(folder, architecture)
    runner = opened(file, replace(DEVICE, **change))
    assert reason in runner.spec.warnings[-1]
    assert reason not in str(opened(file, replace(OPTIONS, **change)).spec.warnings)
    batch = make_batch([Row([1, 2, 3], 0, [1])], VOCAB)
    runner.run(replace(batch, states=np.zeros(1, np.int32))).result()
    assert reads == ["logits"]
