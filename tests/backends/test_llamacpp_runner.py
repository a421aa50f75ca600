"""The llama.cpp runner compared with llama_decode, its memory plan compared with llama.cpp's log, and its errors."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.backends import cpu, llamacpp
from localllm.backends.llamacpp import library, memory_plan
from localllm.backends.llamacpp.library import BuildDevice
from localllm.backends.llamacpp.opening import can_overlap
from localllm.backends.llamacpp.runner import LlamaRunner
from localllm.engine.batch import Want
from localllm.engine.errors import ModelRefused, ModelTooLarge, OutOfMemory, RunnerFailed, SettingRefused
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.lora import Adapter
from localllm.engine.options import LoadOptions
from localllm.engine.request import Sampling

from . import canary, gguf_models, gguf_random
from .batches import Row, Solo, make_batch
from .llama_decode import reference

pytestmark = pytest.mark.real

OPTIONS = LoadOptions(context=256, cache_bytes=2**22, max_rows=4, threads=1)
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def canary_files(folder: Path) -> ModelFiles:
    return read_model(gguf_models.write_canary(folder))


@pytest.fixture
def runner(canary_files: ModelFiles) -> Iterator[LlamaRunner]:
    opened = llamacpp.open(canary_files, OPTIONS)
    assert isinstance(opened, LlamaRunner)
    yield opened
    opened.close()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba"])
def test_tokens_and_logprobs_equal_llama_decode(folder: Path, architecture: str) -> None:
    file = gguf_random.write_random(folder, architecture)
    prompt = np.random.default_rng(1).integers(0, gguf_random.VOCAB, 50).tolist()
    with reference(file) as alone:
        tokens, logits = alone.generate(prompt, 12)
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= logits.max(-1, keepdims=True)
    opened = llamacpp.open(read_model(file), OPTIONS)
    solo = _Sequence(opened, range(1, 17))
    row = prompt
    for step, token in enumerate(tokens):
        result = solo.feed(row, sampling=Sampling(logprobs=3))
        assert result.tokens.tolist() == [token]
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs[0], expected[step, token], atol=1e-3)
        row = [token]
    opened.close()


class _Sequence(Solo):
    """One sequence. A runner with states gets the state 0."""

    def feed(self, tokens: Any, chunk: int | None = None, sampling: Sampling = Sampling()) -> Any:
        batch = make_batch([Row(tokens, len(self.tokens), self.pages, sampling=sampling)], self.runner.spec.vocab_size)
        self.tokens += tokens
        return self.runner.run(replace(batch, states=np.zeros(1, np.int32))).result()


def test_hidden_states_equal_those_of_the_torch_runner(canary_files: ModelFiles, tmp_path: Path) -> None:
    options = replace(OPTIONS, page_size=16)
    prompt = canary.prompt(1, 40, seed=1)
    states = []
    for backend, files in ((llamacpp, canary_files), (cpu, read_model(canary.save(tmp_path)))):
        opened = backend.open(files, options)
        rows = [Row(prompt, 0, range(1, 5), Want.HIDDEN), Row(prompt[:1], 0, range(5, 7), Want.HIDDEN)]
        states.append(opened.run(make_batch(rows, canary.VOCAB)).result().hidden)
        opened.close()
    assert states[0].shape == states[1].shape
    np.testing.assert_allclose(states[0], states[1], atol=2e-2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3moe", "mamba"])
@pytest.mark.parametrize(("cache_dtype", "layout"), [("auto", "shared"), ("q8_0", "shared"), ("q8_0", "rows")])
def test_plan_has_the_bytes_of_llamacpp(
    folder: Path, architecture: str, cache_dtype: Any, layout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = read_model(gguf_random.write_random(folder, architecture))
    options = replace(OPTIONS, cache_dtype=cache_dtype, cache_layout=layout)
    with caplog.at_level(logging.DEBUG, library.__name__):
        opened = llamacpp.open(files, options)
    sizes = re.findall(r"(?:KV|RS) buffer size = +([\d.]+) MiB", caplog.text)
    assert opened.spec.cache_bytes / 2**20 == pytest.approx(sum(map(float, sizes)), rel=0.01)
    assert opened.spec.cache_bytes <= 2**22
    plan = llamacpp.plan_memory(files, options)
    assert plan.cache_bytes(256) <= plan.max_cache
    working = sum(map(float, re.findall(r"(?:compute|output) buffer size = +([\d.]+) MiB", caplog.text)))
    assert 0.3 * working < plan.workspace / 2**20 < 3 * working
    opened.close()


def test_log_is_quiet(canary_files: ModelFiles, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, library.__name__):
        opened = llamacpp.open(canary_files, OPTIONS)
        opened.run(make_batch([Row(canary.prompt(1, 30, seed=1), 0, range(1, 9))], canary.VOCAB)).result()
        opened.close()
    assert [record.message for record in caplog.records if "dummy tokens" not in record.message] == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16"),
        ({"quant": "int8"}, "quant int8"),
        ({"graphs": "full"}, "graphs full"),
        ({"attention": "flashinfer"}, "attention flashinfer"),
        ({"lora_backend": "cpp"}, "lora_backend cpp"),
        ({"ops": ("norm=reference",)}, "ops"),
        ({"cache_dtype": "fp8"}, "cache_dtype fp8"),
        ({"cache_dtype": "int8"}, "cache_dtype int8"),
        ({"max_rows": 129}, "max_rows 129"),
    ],
)
def test_settings_without_effect_are_refused(canary_files: ModelFiles, change: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingRefused, match=name):
        llamacpp.open(canary_files, replace(OPTIONS, **change))
    with pytest.raises(SettingRefused, match=name):
        llamacpp.plan_memory(canary_files, replace(OPTIONS, **change))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (LoadOptions(context=513), ModelRefused, "context of 512 tokens, not 513"),
        (replace(OPTIONS, cache_bytes=2**14), ModelTooLarge, "a context of 256 tokens needs"),
    ],
)
def test_context_that_does_not_fit_is_refused(
    canary_files: ModelFiles, options: LoadOptions, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        llamacpp.open(canary_files, options)


def test_weights_that_do_not_fit_are_refused(canary_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "memory", lambda: (GIB, 2**20))
    with pytest.raises(ModelTooLarge, match="for its weights") as caught:
        llamacpp.open(canary_files, OPTIONS)
    assert caught.value.numbers["free_bytes"] == 2**20


@pytest.mark.parametrize(
    ("free", "option", "layers"),
    [(GIB, None, -1), (2**21, None, 0), (0, None, 0), (GIB, 0, 0), (GIB, 1, 1)],
)
def test_gpu_layers_are_as_many_as_fit(canary_files: ModelFiles, free: int, option: int | None, layers: int) -> None:
    gpus = [BuildDevice("CUDA0", "a GPU", "gpu", 8 * GIB, free), BuildDevice("CPU", "a CPU", "cpu", GIB, GIB)]
    size = memory_plan.measure(canary_files, replace(OPTIONS, gpu_layers=option), gpus, False)
    assert size.gpu_layers == layers
    assert size.on_gpu == (option != 0)


def test_layers_on_gpus_have_room_for_their_cache(canary_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 8 layers of 1 GiB, and a GPU with 4 GiB."""
    monkeypatch.setattr(memory_plan, "memory", lambda: (64 * GIB, 64 * GIB))
    tensors = {"blk": replace(canary_files.tensors["output.weight"], start=0, stop=8 * GIB)}
    config = replace(canary_files.config, num_layers=8, num_kv_heads=64, max_positions=2**17)
    files = replace(canary_files, config=config, tensors=tensors)
    gpu = BuildDevice("CUDA0", "a GPU", "gpu", 8 * GIB, 4 * GIB)
    size = memory_plan.measure(files, replace(OPTIONS, context=None, cache_bytes=None), [gpu], False)
    assert 0 < size.gpu_layers < 4
    share = size.gpu_layers / 9
    plan = size.plan
    assert share * (plan.weights + plan.num_pages * plan.page_bytes) + plan.workspace < 4 * GIB


@pytest.mark.parametrize(
    ("options", "context", "cells"),
    [
        (LoadOptions(max_rows=4), 16384, 16384),
        (LoadOptions(max_rows=128), 16384, 32768),
        (LoadOptions(context=100_000, max_rows=4), 100_000, 100_000),
        (LoadOptions(context=100, max_rows=4), 100, 400),
        (LoadOptions(cache_bytes=2**30, max_rows=4), 2**17, 2**22),
    ],
)
def test_default_context_of_a_cpu_is_short(
    canary_files: ModelFiles, options: LoadOptions, context: int, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp writes to the whole cache when it loads a model."""
    monkeypatch.setattr(memory_plan, "memory", lambda: (64 * GIB, 64 * GIB))
    files = replace(canary_files, config=replace(canary_files.config, max_positions=2**17))
    size = memory_plan.measure(files, options, [], False)
    assert size.plan.context == context
    assert size.cells == cells


@pytest.mark.parametrize(
    ("options", "cells", "rows", "sequences"),
    [
        (LoadOptions(context=1000, max_rows=16), 1024, 16, 24),
        (LoadOptions(context=1000, max_rows=1), 1024, 1, 2),
        (LoadOptions(context=1000, max_rows=128), 1024, 128, 136),
        (LoadOptions(context=1000, max_rows=16, cache_bytes=5 * 1024 * 256), 1024, 4, 5),
        (LoadOptions(context=1000, max_rows=16, cache_bytes=1024 * 256), 1024, 1, 1),
        (LoadOptions(max_rows=16, cache_bytes=4 * 1024 * 256), 1024, 3, 4),
        (LoadOptions(max_rows=2), 16384, 2, 4),
    ],
)
def test_each_row_has_cells_for_a_context(
    canary_files: ModelFiles,
    options: LoadOptions,
    cells: int,
    rows: int,
    sequences: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The canary needs 256 bytes for each position. With several sequences, at least one has no row."""
    monkeypatch.setattr(memory_plan, "memory", lambda: (64 * GIB, 64 * GIB))
    files = replace(canary_files, config=replace(canary_files.config, max_positions=2**17))
    size = memory_plan.measure(files, replace(options, cache_layout="rows"), [], False)
    assert (size.row_cells, size.rows, size.sequences) == (cells, rows, sequences)
    assert size.plan.num_pages * size.plan.page_bytes == cells * sequences * 256


def test_few_row_caches_are_told_to_the_user(canary_files: ModelFiles) -> None:
    opened = llamacpp.open(canary_files, replace(OPTIONS, cache_bytes=3 * 256 * 256, cache_layout="rows"))
    assert opened.spec.max_rows == opened.spec.max_paths == 2
    assert opened.spec.warnings == ("the memory has room for 2 rows of 256 tokens; max_rows is 4",)
    opened.close()


def test_rows_are_computed_in_order_of_their_sequences(canary_files: ModelFiles) -> None:
    """llama.cpp computes only consecutive sequences in ascending order together. The results have the batch's order."""
    opened = llamacpp.open(canary_files, replace(OPTIONS, cache_bytes=None, cache_layout="rows"))
    assert isinstance(opened, LlamaRunner)
    prompts = [canary.prompt(key, 30, seed=key) for key in (1, 2, 3)]
    rows = [Row(prompt, 0, range(1 + 6 * row, 7 + 6 * row)) for row, prompt in enumerate(prompts)]
    opened.run(make_batch(rows, canary.VOCAB))
    expected = [canary.walk(prompt, 2) for prompt in prompts]
    rows = [Row([expected[row][0]], 30, range(1 + 6 * row, 7 + 6 * row)) for row in (2, 0, 1)]
    sequences: list[list[int]] = []
    place = opened._tokens.place

    def record(positions: Any, places: Any, outputs: Any) -> None:
        sequences.append(places.tolist())
        place(positions, places, outputs)

    opened._tokens.place = record  # type: ignore[method-assign]
    result = opened.run(make_batch(rows, canary.VOCAB)).result()
    assert sequences == [[0, 1, 2]]
    assert result.tokens.tolist() == [expected[row][1] for row in (2, 0, 1)]
    opened.close()


def test_results_outlive_the_next_step(runner: LlamaRunner) -> None:
    """llama.cpp has one buffer of logits. Steps that carry no tokens also overlap, for example if all rows wait."""
    prompts = [canary.prompt(key, 30, seed=key) for key in (1, 2)]
    steps = [
        runner.run(make_batch([Row(prompt, 0, range(1 + 6 * index, 7 + 6 * index))], canary.VOCAB))
        for index, prompt in enumerate(prompts)
    ]
    assert [step.result().tokens.tolist() for step in steps] == [canary.walk(prompt, 1) for prompt in prompts]


def test_only_gpus_overlap_steps(canary_files: ModelFiles) -> None:
    size = memory_plan.measure(canary_files, OPTIONS, [], False)
    assert not can_overlap(size)
    gpu = BuildDevice("CUDA0", "a GPU", "gpu", 8 * GIB, 8 * GIB)
    assert can_overlap(memory_plan.measure(canary_files, OPTIONS, [gpu], False))


@pytest.mark.parametrize("context", [None, 64, 65])
def test_short_contexts_have_the_rope_of_short_contexts(canary_files: ModelFiles, context: int | None) -> None:
    """llama.cpp selects the factors of a rope by the number of cells. A model with two kinds has no more cells than the
    original context, unless the options have a longer context."""
    key = "llama.rope.scaling.original_context_length"
    files = replace(
        canary_files,
        metadata={**canary_files.metadata, key: 64},
        tensors={**canary_files.tensors, "rope_factors_long.weight": canary_files.tensors["output.weight"]},
        config=replace(canary_files.config, max_positions=4096),
    )
    size = memory_plan.measure(files, LoadOptions(context=context, max_rows=1), [], False)
    assert (size.cells <= 64) == (context == 64)
    assert size.cells >= (context or 4096)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gguf": ()}, "it reads only GGUF files"),
        ({"architecture": "nomic-bert"}, "an encoder, which generates no text"),
        ({"architecture": "t5encoder"}, "an encoder"),
        ({"architecture": "llada"}, "a diffusion model"),
        ({"architecture": "eagle3"}, "a draft model"),
        ({"metadata": {"llama.attention.causal": False}}, "its attention is not causal"),
        ({"architecture": "llama99"}, "does not know the architecture llama99; a newer version may"),
    ],
)
def test_models_that_generate_no_text_are_refused(
    canary_files: ModelFiles, change: dict[str, Any], reason: str
) -> None:
    architecture = change.pop("architecture", "llama")
    config = replace(canary_files.config, model_type=architecture)
    files = replace(canary_files, config=config, **change)
    assert reason in llamacpp.accepts(files)
    with pytest.raises(ModelRefused, match=reason):
        llamacpp.open(files, OPTIONS)


def test_model_of_an_unknown_architecture_is_refused_with_the_reason(tmp_path: Path) -> None:
    with gguf_models.writer(tmp_path / "new.gguf", "brandnew") as out:
        out.add_context_length(64)
        out.add_embedding_length(32)
        out.add_block_count(1)
        out.add_head_count(1)
        out.add_vocab_size(21)
        out.add_tensor("token_embd.weight", np.zeros((21, 32), np.float32))
    with pytest.raises(ModelRefused, match="does not know the architecture brandnew"):
        llamacpp.open(read_model(tmp_path / "new.gguf"), replace(OPTIONS, context=64))


@pytest.mark.parametrize(
    ("code", "error"), [(1, OutOfMemory), (-2, OutOfMemory), (-1, RunnerFailed), (2, RunnerFailed)]
)
def test_failed_step_has_a_typed_error(
    runner: LlamaRunner, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    prompt = canary.prompt(1, 30, seed=1)
    step = make_batch([Row(prompt, 0, range(1, 9))], canary.VOCAB)
    with monkeypatch.context() as patched:
        patched.setattr(runner._c, "llama_decode", lambda context, batch: code)
        with pytest.raises(error):
            runner.run(step)
    assert runner.run(step).result().tokens.tolist() == canary.walk(prompt, 1), "the next step is computed"


class TestAdapters:
    def test_changed_file_is_refused(self, runner: LlamaRunner, tmp_path: Path) -> None:
        file = gguf_models.write_canary_adapter(tmp_path / "a.gguf", 1)
        with pytest.raises(ModelRefused, match="its files have changed"):
            runner.prepare_adapter(Adapter("a", str(file), "0"))

    def test_adapter_of_another_model_is_refused_with_the_reason(self, runner: LlamaRunner, tmp_path: Path) -> None:
        file = tmp_path / "a.gguf"
        with gguf_models.writer(file, "llama") as out:
            out.add_type("adapter")
            out.add_string("adapter.type", "lora")
            out.add_float32("adapter.lora.alpha", 4.0)
            out.add_tensor("blk.7.attn_v.weight.lora_a", np.zeros((4, 128), np.float32))
            out.add_tensor("blk.7.attn_v.weight.lora_b", np.zeros((64, 4), np.float32))
        with pytest.raises(ModelRefused, match=r"blk.7.attn_v.weight' does not exist in base model"):
            runner.prepare_adapter(Adapter("a", str(file), read_adapter(file).version))

    def test_runner_without_slots_says_how_to_get_them(self, canary_files: ModelFiles, tmp_path: Path) -> None:
        opened = llamacpp.open(canary_files, replace(OPTIONS, adapter_slots=0))
        file = gguf_models.write_canary_adapter(tmp_path / "a.gguf", 1)
        with pytest.raises(ModelRefused, match="without adapter slots") as caught:
            opened.prepare_adapter(Adapter("a", str(file), read_adapter(file).version))
        assert "adapter_slots" in caught.value.hint
        opened.close()

    def test_adapter_is_not_added_to_the_model_during_a_step(
        self, runner: LlamaRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """llama_decode iterates over the model's set of adapters, to which llama_adapter_lora_init adds one."""
        file = gguf_models.write_canary_adapter(tmp_path / "a.gguf", 1)
        adapter = Adapter("a", str(file), read_adapter(file).version)
        c = library.library().c
        decode = c.llama_decode
        initialise = c.llama_adapter_lora_init
        calls: list[str] = []
        preparing = threading.Thread(target=runner.prepare_adapter, args=(adapter,))

        def slow_decode(*values: Any) -> Any:
            preparing.start()
            preparing.join(0.3)
            calls.append("decode")
            return decode(*values)

        monkeypatch.setattr(c, "llama_decode", slow_decode)
        monkeypatch.setattr(
            c, "llama_adapter_lora_init", lambda *values: (calls.append("adapter"), initialise(*values))[1]
        )
        runner.run(make_batch([Row(canary.prompt(1, 30, seed=1), 0, range(1, 9))], canary.VOCAB))
        preparing.join()
        runner.forget_adapter(adapter)
        assert calls == ["decode", "adapter"]

    def test_two_adapters_are_changed_once_a_step(
        self, canary_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """llama.cpp allocates its graphs anew after each change."""
        opened = llamacpp.open(canary_files, OPTIONS)
        for slot in (1, 2):
            file = gguf_models.write_canary_adapter(tmp_path / f"{slot}.gguf", slot)
            adapter = Adapter(file.stem, str(file), read_adapter(file).version)
            opened.prepare_adapter(adapter)
            opened.load_adapter(slot, adapter)
        changes = []
        change = library.library().c.llama_set_adapters_lora
        monkeypatch.setattr(
            library.library().c, "llama_set_adapters_lora", lambda *values: (changes.append(1), change(*values))[1]
        )
        prompts = [canary.prompt(key, 30, seed=key) for key in (1, 2)]
        tokens: list[list[int]] = [[], []]
        for step in range(6):
            inputs = [row[-1:] for row in tokens] if step else prompts
            rows = [Row(inputs[row], 29 + step if step else 0, range(1 + 6 * row, 7 + 6 * row)) for row in (0, 1)]
            batch = make_batch(rows, canary.VOCAB)
            result = opened.run(replace(batch, adapters=np.array([1, 2], np.int32))).result()
            for row in (0, 1):
                tokens[row].append(int(result.tokens[row]))
        assert tokens == [canary.walk(canary.under(prompts[row], row + 1), 6) for row in (0, 1)]
        assert len(changes) == 7, "two in the first step, one in each other step"
        opened.close()
