"""The worker process with guide as a GGUF file. Its answers equal those of guide in safetensors on the CPU."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.app import frames, paths
from localllm.app.commands.store import show
from localllm.app.frames import Failed, Finished, Generate, ResponseFormat
from tests.backends.gguf_models import write_embedder as write_gguf_embedder
from tests.backends.gguf_models import write_guide

from ..embedder import write_embedder
from .worker_process import Result, WorkerProcess

OPTIONS: dict[str, Any] = {"context": 1024, "cache_bytes": 2**26, "max_rows": 4}
QUESTION = [{"role": "user", "content": "How do I download a model? <|im_end|> <tool_call>"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "greet", "parameters": PERSON}}]

_ids = itertools.count()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_guide(tmp_path_factory.mktemp("gguf") / "guide.gguf")


def started(path: Path, **more: Any) -> Iterator[WorkerProcess]:
    worker = WorkerProcess()
    loaded = worker.load(path, **OPTIONS, **more)
    assert isinstance(loaded, frames.Loaded), loaded
    yield worker
    worker.send(frames.Shutdown())
    code, log = worker.close()
    assert (code, "Traceback" in log) == (0, False), log


@pytest.fixture(scope="module")
def llamacpp(gguf: Path) -> Iterator[WorkerProcess]:
    yield from started(gguf, backend="auto")


@pytest.fixture(scope="module")
def cpu() -> Iterator[WorkerProcess]:
    yield from started(paths.guide_dir(), dtype="float32")


def ask(worker: WorkerProcess, **fields: Any) -> list[Result]:
    if "prompt" not in fields:
        fields.setdefault("messages", QUESTION)
    return worker.generate(Generate(id=f"r{next(_ids)}", **{"temperature": 0.0, "max_tokens": 48, **fields}))


def facts(result: Result) -> dict[str, Any]:
    end = result.end
    assert isinstance(end, Finished), end
    return {
        "text": result.text(),
        "reasoning": "".join(piece.reasoning for piece in result.pieces()),
        "calls": result.calls(),
        "finish": result.finish(),
        "prompt": end.prompt_tokens,
        "tokens": end.completion_tokens,
    }


REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {},
    "until the end": {"max_tokens": None},
    "stop text": {"stop": ["pull"]},
    "stop id": {"stop_ids": [205]},
    "raw prompt": {"prompt": "The command `localllm pull`"},
    "raw prompt with a special token": {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"},
    "token ids": {"prompt": [1, 293, 205]},
    "continued": {
        "messages": [*QUESTION, {"role": "assistant", "content": "Run `localllm"}],
        "continue_final_message": True,
    },
    "tools": {"tools": TOOLS, "messages": [{"role": "user", "content": "Greet Ann, who is 2, with the tool."}]},
    "forced tool": {"tools": TOOLS, "forced_tools": TOOLS},
    "strict tool": {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]},
    "schema": {"response_format": ResponseFormat(kind="json_schema", schema=PERSON)},
    "any JSON": {"response_format": ResponseFormat(kind="json_object")},
    "regex": {"response_format": ResponseFormat(kind="regex", regex="(é|日本|x){3}")},
    "choice": {"response_format": ResponseFormat(kind="choice", choices=["für", "<|im_end|>"])},
    "bias": {"logit_bias": {300: 50.0}, "max_tokens": 4},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "echo": {"prompt": "a <|im_start|> b", "echo": True, "max_tokens": 4},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_equal_those_of_safetensors(name: str, llamacpp: WorkerProcess, cpu: WorkerProcess) -> None:
    answers = [facts(ask(worker, **REQUESTS[name])[0]) for worker in (llamacpp, cpu)]
    assert answers[0] == answers[1]
    assert answers[0]["text"] or answers[0]["calls"]


def test_logprobs_equal_those_of_safetensors(llamacpp: WorkerProcess, cpu: WorkerProcess) -> None:
    actual, expected = [ask(worker, logprobs=3)[0].logprobs() for worker in (llamacpp, cpu)]
    assert [(entry.token, entry.id, entry.bytes) for entry in actual] == [
        (entry.token, entry.id, entry.bytes) for entry in expected
    ]
    for one, other in zip(actual, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert [entry.id for entry in one.top] == [entry.id for entry in other.top]


def test_a_seed_repeats_the_answer(llamacpp: WorkerProcess) -> None:
    answers = [facts(ask(llamacpp, temperature=9.0, top_k=0, top_p=1.0, seed=7, max_tokens=12)[0]) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0] != facts(ask(llamacpp, temperature=9.0, top_k=0, top_p=1.0, seed=8, max_tokens=12)[0])


def test_tokens_and_text_convert_as_with_safetensors(llamacpp: WorkerProcess, cpu: WorkerProcess) -> None:
    replies = []
    for worker in (llamacpp, cpu):
        tokens = worker.ask(frames.Tokenize(id="t", prompt="a <|im_end|> é日本\n", add_special_tokens=True))
        assert isinstance(tokens, frames.Tokens)
        replies.append((tokens, worker.ask(frames.Detokenize(id="d", tokens=tokens.tokens))))
    assert replies[0] == replies[1]
    assert replies[0][1] == frames.Text(id="d", text="a <|im_end|> é日本\n")


def test_recommended_sampling_is_that_of_the_file(llamacpp: WorkerProcess, cpu: WorkerProcess) -> None:
    """guide recommends a temperature above zero: the same seed gives the same answer."""
    answers = [facts(ask(worker, temperature=None, seed=3)[0]) for worker in (llamacpp, cpu)]
    assert answers[0] == answers[1]


def test_a_long_text_is_refused_by_the_context(llamacpp: WorkerProcess) -> None:
    end = ask(llamacpp, prompt=" " * 300_000)[0].end
    assert isinstance(end, Failed)
    assert end.fault.code == "context_length_exceeded"


def test_a_damaged_file_fails_to_load(gguf: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf.read_bytes()[:-100])
    worker = WorkerProcess()
    failed = worker.load(damaged, backend="auto")
    worker.close()
    assert isinstance(failed, frames.LoadFailed)
    assert "damaged.gguf is not a valid GGUF file" in failed.fault.message


NOT_GGUF = {
    "dtype": "float32",
    "quant": "int8",
    "cache_dtype": "fp8",
    "graphs": "full",
    "max_rows": 200,
    "context": 100_000,
}


def test_settings_of_other_backends_do_not_disable_gguf_models(gguf: Path) -> None:
    worker = WorkerProcess()
    options = OPTIONS | NOT_GGUF
    loaded = worker.load(gguf, backend="cpu", shared=("backend", *NOT_GGUF), **options)
    assert isinstance(loaded, frames.Loaded), loaded
    assert set(loaded.info.unapplied) == {"backend", *NOT_GGUF}
    assert (loaded.info.backend, loaded.info.context) == ("llamacpp", 2048)
    for name in loaded.info.unapplied:
        assert any(f"localllm config tiny {name}=" in warning for warning in loaded.info.warnings), name
    (result,) = ask(worker, messages=[{"role": "user", "content": "What is the command to download a model?"}])
    assert "localllm pull" in result.text()
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


@pytest.mark.parametrize("name", NOT_GGUF)
def test_a_setting_of_one_gguf_model_that_llamacpp_lacks_is_refused(gguf: Path, name: str) -> None:
    worker = WorkerProcess()
    failed = worker.load(gguf, backend="auto", **OPTIONS | {name: NOT_GGUF[name]})
    worker.close()
    assert isinstance(failed, frames.LoadFailed)
    assert name in failed.fault.message
    assert failed.fault.hint


def test_settings_of_gguf_models_do_not_disable_others() -> None:
    worker = WorkerProcess()
    shared = {"cache_dtype": "q8_0", "cache_layout": "rows", "gpu_layers": 3, "rope_scale": 2.0, "rope_base": 5e5}
    loaded = worker.load(paths.guide_dir(), backend="llamacpp", shared=("backend", *shared), context=512, **shared)
    assert isinstance(loaded, frames.Loaded), loaded
    assert set(loaded.info.unapplied) == {"backend", *shared}
    worker.send(frames.Shutdown())
    assert worker.close()[0] == 0


@pytest.mark.real
def test_embeddings_equal_those_of_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both tokenizers append the end token. The file has a pooling type, and llama.cpp's flash attention 16 bits."""
    folder = write_embedder(tmp_path / "model")
    file = write_gguf_embedder(tmp_path / "embedder-F32.gguf", folder)
    texts = ["hello", "the quick brown fox", "größer, 日本語"]
    results = []
    for path, options in ((folder, {"dtype": "float32", "backend": "cpu"}), (file, {"backend": "auto"})):
        worker = WorkerProcess()
        loaded = worker.load(path, context=256, max_rows=4, **options)
        assert isinstance(loaded, frames.Loaded), loaded
        assert loaded.info.embedding_size == 32
        results.append(worker.generate(*(frames.Embed(id=text, input=text) for text in texts)))
        worker.send(frames.Shutdown())
        assert worker.close()[0] == 0
    for expected, actual in zip(*results, strict=True):
        assert actual.started == expected.started
        vectors = [np.frombuffer(result.frames[1].vector, "<f4") for result in (actual, expected)]
        np.testing.assert_allclose(*vectors, atol=5e-3)
    assert show(str(file), True) == 0
    assert json.loads(capsys.readouterr().out)["embeddings"] == "last token, normalised, 32 numbers"
