"""The worker process computes embeddings: the vectors against transformers, limits and refusals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from localllm.app import frames
from localllm.app.chat.prompt import PromptMaker
from localllm.app.chat.template.renderer import TemplateRenderer
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.errors import AppError, ContextTooLong, EmbeddingsUnsupported, InvalidRequest, OutOfMemory
from localllm.app.frames import Embed, Embedded, Failed, Finished, Generate, Started
from localllm.app.worker.embedding import prepare_embedding
from localllm.app.worker.opening import OpenModel
from localllm.engine.files.pooling import Pooling
from localllm.engine.request import Delta
from localllm.engine.runner import RunnerSpec

from ..embedder import END, write_embedder
from ..tiny_qwen import VOCAB, write_model
from .worker_process import Result, WorkerProcess

CONTEXT = 256
SIZE = 32
TEXTS = ["hello", "the quick brown fox", "größer, naïve, 日本語 and 🙂 text", "the quick brown fox jumps", "x" * 100]

_ids = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_embedder(tmp_path_factory.mktemp("tiny") / "model", tied=False, context=CONTEXT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    file = folder / "tokenizer_config.json"
    more = {"additional_special_tokens": [f"<|more{index}|>" for index in range(VOCAB)]}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[WorkerProcess]:
    made = WorkerProcess()
    loaded = made.load(folder, dtype="float32")
    assert isinstance(loaded, frames.Loaded), loaded
    assert loaded.info.embedding_size == SIZE
    yield made
    made.send(frames.Shutdown())
    code, log = made.close()
    assert (code, "Traceback" in log) == (0, False), log


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder)


def embed(text: Any, **fields: Any) -> Embed:
    return Embed(id=f"e{next(_ids)}", input=text, **fields)


def vector_of(result: Result) -> np.ndarray:
    started, embedded, finished = result.frames
    assert isinstance(started, Started)
    assert isinstance(embedded, Embedded)
    assert isinstance(finished, Finished)
    assert (finished.prompt_tokens, finished.completion_tokens) == (started.prompt_tokens, 0)
    return np.frombuffer(embedded.vector, "<f4")


def refused(worker: WorkerProcess, text: Any, **fields: Any) -> frames.Fault:
    [result] = worker.generate(embed(text, **fields))
    assert isinstance(result.end, Failed), result.frames
    assert len(result.frames) == 1
    return result.end.fault


@pytest.mark.real
def test_vectors_equal_those_of_transformers(worker: WorkerProcess, folder: Path, tokenizer: ChatTokenizer) -> None:
    """Last token, which is the end token that the tokenizer appends, normalised. Texts in one batch, then again."""
    model = AutoModel.from_pretrained(folder)
    for _ in range(2):
        results = worker.generate(*(embed(text) for text in TEXTS), Generate(id=f"g{next(_ids)}", prompt="no text"))
        assert results.pop().end.fault.param == "model"  # type: ignore[union-attr]
        for text, result in zip(TEXTS, results, strict=True):
            ids = tokenizer.encode(text, add_special_tokens=True)
            assert ids[-1] == tokenizer.id_of(END)
            with torch.inference_mode():
                hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
            actual = vector_of(result)
            assert result.started.prompt_tokens == len(ids)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
            assert np.linalg.norm(actual) == pytest.approx(1, abs=1e-5)


@pytest.mark.real
def test_cut_vectors_are_normalised_again(worker: WorkerProcess) -> None:
    full, cut, same = map(vector_of, worker.generate(*(embed("hello", dimensions=size) for size in (None, 8, SIZE))))
    assert (len(full), len(cut), len(same)) == (SIZE, 8, SIZE)
    np.testing.assert_allclose(cut, full[:8] / np.linalg.norm(full[:8]), atol=1e-6)
    np.testing.assert_array_equal(same, full)
    fault = refused(worker, "hello", dimensions=9)
    assert (fault.code, fault.param) == ("unsupported_parameter", "dimensions")
    assert "8, 16, 32 numbers, not 9" in fault.message


@pytest.mark.real
def test_token_ids(worker: WorkerProcess, tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("hello fox", add_special_tokens=True)
    expected, actual = worker.generate(embed("hello fox"), embed(ids))
    np.testing.assert_array_equal(vector_of(actual), vector_of(expected))


def test_a_special_token_that_has_no_embedding_is_refused(worker: WorkerProcess) -> None:
    """The files of a fine-tune name special tokens, and its weights are those of the base model."""
    fault = refused(worker, "hello <|more511|>")
    assert (fault.code, fault.param) == ("invalid_request", "input")
    assert f"is not in the model's vocabulary of {VOCAB}" in fault.message


def test_token_ids_of_another_tokenizer_are_refused(worker: WorkerProcess) -> None:
    """LangChain sends ids of OpenAI's tokenizers to every server."""
    fault = refused(worker, [15339, 4435])
    assert (fault.code, fault.param) == ("invalid_request", "input")
    assert "not in the model's vocabulary" in fault.message
    fault = refused(worker, [5, 6])
    assert "not those of this model's tokenizer, which end with [0]" in fault.message
    assert "/v1/tokenize" in fault.hint


def test_long_text_is_refused(worker: WorkerProcess) -> None:
    for text in ("fox " * CONTEXT, "fox " * 10_000):
        fault = refused(worker, text)
        assert (fault.code, fault.param) == ("context_length_exceeded", "input")
        assert f"maximum context length is {CONTEXT} tokens" in fault.message
        assert fault.numbers["n_ctx"] == CONTEXT


@pytest.mark.real
def test_text_may_fill_the_context(worker: WorkerProcess) -> None:
    [result] = worker.generate(embed([5] * (CONTEXT - 1) + [0]))
    assert len(vector_of(result)) == SIZE


@pytest.mark.real
def test_cancel_frees_the_memory(worker: WorkerProcess) -> None:
    requests = [embed([5 + index] * 200 + [0]) for index in range(40)]
    worker.send(*requests, *(frames.Cancel(id=request.id) for request in requests))
    ends = {}
    while len(ends) < len(requests):
        frame = worker.read()
        if isinstance(frame, Finished):
            ends[frame.id] = frame
    assert any(end.cancelled for end in ends.values())
    vector_of(worker.generate(embed("hello"))[0])
    worker.send(frames.AskStats(id="stats"))
    stats = worker.read()
    while not isinstance(stats, frames.Stats):
        stats = worker.read()
    assert (stats.running, stats.waiting, stats.cache_used) == (0, 0, 0)


def unit(folder: Path, pooling: Pooling | None, size: int = SIZE, **fields: Any) -> OpenModel:
    """A model without a runner."""
    tokenizer = ChatTokenizer(folder)
    spec = RunnerSpec(vocab_size=VOCAB, max_tokens=64, max_rows=8, max_context=CONTEXT, hidden_size=SIZE)
    info = frames.ModelInfo(
        model="org/m",
        backend="mlx",
        device="d",
        dtype="float32",
        context=CONTEXT,
        vocab=VOCAB,
        weight_bytes=0,
        cache_bytes=0,
        cache_tokens=0,
        embedding_size=size,
    )
    runner: Any = SimpleNamespace(spec=spec)
    renderer = TemplateRenderer()
    prompts = PromptMaker(tokenizer, renderer)
    return OpenModel(info, runner, tokenizer, renderer, prompts, {}, pooling=pooling, **fields)


@pytest.mark.parametrize(
    ("pooling", "size", "reason"),
    [
        (None, SIZE, "org/m is no embedding model: its files describe no pooling"),
        (Pooling(SIZE, problem="the pooling mean is not supported"), 0, "no embeddings: the pooling mean is not"),
        (Pooling(SIZE), 0, "the backend mlx returns no hidden states of this architecture"),
    ],
)
def test_models_without_embeddings_are_refused(folder: Path, pooling: Pooling | None, size: int, reason: str) -> None:
    with pytest.raises(EmbeddingsUnsupported, match=reason) as error:
        prepare_embedding(embed("hello"), unit(folder, pooling, size))
    assert error.value.param == "model"


def test_prompt_and_limit_of_the_files(folder: Path, tokenizer: ChatTokenizer) -> None:
    model = unit(folder, Pooling(SIZE, prompt="Query: ", max_tokens=12))
    [request] = prepare_embedding(embed("hi"), model).requests
    assert list(request.prompt) == tokenizer.encode("Query: hi", add_special_tokens=True)
    assert (request.wants_hidden, request.max_tokens) == (True, 0)
    with pytest.raises(ContextTooLong, match="length is 12 tokens"):
        prepare_embedding(embed("fox " * 20), model)


def test_token_ids_without_the_prompt_of_the_files_are_refused(folder: Path) -> None:
    model = unit(folder, Pooling(SIZE, prompt="Query: "))
    with pytest.raises(InvalidRequest, match="its files put a text before every input, 'Query: '") as caught:
        prepare_embedding(embed([5, 0]), model)
    assert caught.value.param == "input"


def test_token_ids_need_a_tokenizer_with_special_tokens(tmp_path: Path) -> None:
    model = unit(write_model(tmp_path), Pooling(SIZE))
    with pytest.raises(InvalidRequest, match="its tokenizer adds no special tokens"):
        prepare_embedding(embed([5, 6]), model)
    with pytest.raises(InvalidRequest, match="at least one token"):
        prepare_embedding(embed(""), model)


@pytest.mark.parametrize("hidden", [[0.0] * SIZE, [float("nan")] * SIZE, [float("inf"), *[1.0] * 31], [1.0] * 8, []])
def test_hidden_state_that_is_no_vector_is_an_error(folder: Path, hidden: list[float]) -> None:
    embedding = prepare_embedding(embed("hi"), unit(folder, Pooling(SIZE)))
    with pytest.raises(AppError, match="no vector"):
        embedding.take(Delta("e/0", (), finish="stop", hidden=np.array(hidden, np.float32)))


def test_vector_of_files_without_normalize(folder: Path) -> None:
    embedding = prepare_embedding(embed("hi"), unit(folder, Pooling(SIZE, normalised=False)))
    hidden = np.arange(SIZE, dtype=np.float32)
    embedded = embedding.take(Delta("e/0", (), finish="stop", cached=1, hidden=hidden))
    assert embedded is not None
    np.testing.assert_array_equal(np.frombuffer(embedded.vector, "<f4"), hidden)
    assert embedding.finished().cached_tokens == 1


def test_lost_requests_are_errors(folder: Path) -> None:
    embedding = prepare_embedding(embed("hi"), unit(folder, Pooling(SIZE)))
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        embedding.take(Delta("e/0", (), finish="no_memory", error="CUDA out of memory"))
    assert embedding.take(Delta("e/0", (), finish="cancelled")) is None
    assert embedding.has_ended


def test_a_typed_end_token_is_warned_of(folder: Path, tokenizer: ChatTokenizer) -> None:
    model = unit(folder, Pooling(SIZE))
    assert prepare_embedding(embed("hello"), model).warnings == ()
    [warning] = prepare_embedding(embed(f"hello{END}"), model).warnings
    assert warning.startswith(f"the prompt ends with '{END}' twice: the input has it")
