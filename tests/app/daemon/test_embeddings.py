"""POST /v1/embeddings with OpenAI's client: with a fake worker, and with a real worker and an embedding model."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from localllm.app.daemon.process import COMMAND

from ...waiting import wait_until
from ..embedder import write_embedder
from ..tiny_qwen import write_model
from .conftest import Daemon

MODEL = "test/echo"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def post(daemon: Daemon, **body: Any) -> httpx.Response:
    return daemon.http.post(f"{daemon.url}/v1/embeddings", json={"model": MODEL, "input": "abc"} | body)


def error_of(daemon: Daemon, **body: Any) -> tuple[int, str, str | None, str]:
    response = post(daemon, **body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"], error["message"]


def test_one_text(client: openai.OpenAI) -> None:
    """OpenAI's client requests base64 and decodes it."""
    reply = client.embeddings.create(model=MODEL, input="abc", user="someone")
    [entry] = reply.data
    assert (entry.object, entry.index, entry.embedding) == ("embedding", 0, [3.0, 0.0, 0.0, 1.0, 0.0])
    assert (reply.object, reply.model) == ("list", MODEL)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (3, 3)


def test_encodings(daemon: Daemon) -> None:
    for fields in ({}, {"encoding_format": "float"}):
        reply = post(daemon, **fields).json()
        assert reply["data"] == [{"object": "embedding", "index": 0, "embedding": [3.0, 0.0, 0.0, 1.0, 0.0]}]
        assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    [entry] = post(daemon, encoding_format="base64").json()["data"]
    assert struct.unpack("<5f", base64.b64decode(entry["embedding"])) == (3.0, 0.0, 0.0, 1.0, 0.0)
    assert daemon.http.post(f"{daemon.url}/embeddings", json={"model": MODEL, "input": "a"}).status_code == 200


def test_several_texts_and_token_ids(client: openai.OpenAI) -> None:
    def vectors(value: Any, **fields: Any) -> list[list[float]]:
        reply = client.embeddings.create(model=MODEL, input=value, **fields)
        assert [entry.index for entry in reply.data] == list(range(len(reply.data)))
        return [entry.embedding[:3] for entry in reply.data]

    assert vectors(["a", "bb", "a"]) == [[1, 0, 0], [2, 0, 0], [1, 0, 0]]
    assert vectors([5, 6], dimensions=7) == [[2, 11, 7]]
    assert vectors([[5, 6], [7]]) == [[2, 11, 0], [1, 7, 0]]


def test_many_texts_are_computed_in_groups(daemon: Daemon, client: openai.OpenAI) -> None:
    def counted() -> float:
        lines = httpx.get(f"{daemon.url}/metrics").text.splitlines()
        prefix = f'localllm_requests_total{{model="{MODEL}",status="ok"}}'
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(prefix))

    before = counted()
    texts = ["x" * (1 + index % 7) for index in range(2048)]
    reply = client.embeddings.create(model=MODEL, input=texts)
    assert [entry.embedding[0] for entry in reply.data] == [len(text) for text in texts]
    assert reply.usage.prompt_tokens == sum(map(len, texts))
    assert max(entry.embedding[3] for entry in reply.data) <= 64
    assert counted() == before + 1


def test_groups_fit_into_the_queue(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(max_queue=2)
    assert len(post(daemon, input=["a"] * 5).json()["data"]) == 5


@pytest.mark.parametrize(
    ("fields", "code", "param", "text"),
    [
        ({"input": ""}, "invalid_request", "input", "at least one token"),
        ({"input": ["a", ""]}, "invalid_request", "input", "at least one token"),
        ({"input": [[1], []]}, "invalid_request", "input", "at least one token"),
        ({"input": []}, "invalid_request", "input", "input: the list is empty"),
        ({"input": ["a", 1]}, "invalid_request", "input", "(not mixed)"),
        ({"input": ["a"] * 2049}, "invalid_request", "input", "2049 inputs exceed the limit of 2048"),
        ({"input": {"text": "a"}}, "invalid_request", "input", "input: "),
        ({"encoding_format": "int8"}, "unsupported_parameter", "encoding_format", "supported: float and base64"),
        ({"dimensions": 0}, "invalid_request", "dimensions", "dimensions: "),
        ({"truncate_prompt_tokens": 9}, "unsupported_parameter", "truncate_prompt_tokens", "unknown parameter"),
        ({"lora": [{"name": "a"}, {"name": "b"}]}, "unsupported_parameter", "lora", "one adapter"),
        ({"input": "refuse"}, "embeddings_unsupported", "model", "no embedding model"),
    ],
)
def test_refused_requests(daemon: Daemon, fields: dict[str, Any], code: str, param: str, text: str) -> None:
    status, *error, message = error_of(daemon, **fields)
    assert (status, error) == (400, [code, param])
    assert text in message


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [("fail", 500, "internal_error"), ("silent", 500, "internal_error"), ("stopped", 503, "server_stopping")],
)
def test_failed_requests(daemon: Daemon, text: str, status: int, code: str) -> None:
    assert error_of(daemon, input=["fine", text])[:2] == (status, code)


def test_unknown_names(daemon: Daemon) -> None:
    assert error_of(daemon, model="test/none")[:3] == (404, "model_not_found", "model")
    assert error_of(daemon, model=f"{MODEL}:none")[:2] == (404, "adapter_not_found")
    assert error_of(daemon, load={"quant": "int8"})[:2] == (403, "forbidden")


def test_adapters(daemon: Daemon, tmp_path: Path) -> None:
    def adapter_of(**fields: Any) -> float:
        return float(post(daemon, **fields).json()["data"][0]["embedding"][4])

    with daemon.local() as local:
        body = {"lora_name": "four", "lora_path": str(tmp_path), "model": MODEL}
        loaded = local.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        assert adapter_of() == 0
        assert adapter_of(model=f"{MODEL}:four") == 4
        assert post(daemon, model=f"{MODEL}:four").json()["model"] == f"{MODEL}:four"
        assert adapter_of(lora=[{"name": "four", "scale": 0.5}]) == 2
        [entry] = local.get("/lora-adapters").json()
        local.post("/lora-adapters", json=[{"id": entry["id"], "scale": 2.0}])
        assert adapter_of() == 8
        assert adapter_of(lora=[]) == 0
        assert local.post("/v1/unload_lora_adapter", json={"lora_name": "four"}).status_code == 200


def test_disconnect_cancels_the_requests(daemon: Daemon) -> None:
    body = {"model": MODEL, "input": ["hang", "hang"]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{daemon.url}/v1/embeddings", json=body, timeout=httpx.Timeout(100, read=0.5))
    wait_until(lambda: daemon.loaded()[MODEL]["requests"] == 0)


@pytest.fixture(scope="module")
def real(short_folder: Callable[[], Path]) -> Iterator[Daemon]:
    """A daemon with a real worker, an embedding model and a chat model."""
    folder = short_folder()
    for name, write in (("embedder", write_embedder), ("chat", write_model)):
        repo = folder / "hub" / f"models--test--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text("0123456789abcdef")
        write(repo / "snapshots" / "0123456789abcdef")
    env = {"TEST_WORKER": json.dumps(COMMAND), "OMP_NUM_THREADS": "1"}
    daemon = Daemon(folder, env=env, backend="cpu", dtype="float32", cache_mib=16, max_rows=8, threads=1)
    assert daemon.url
    yield daemon
    assert daemon.stop() == 0, daemon.log


@pytest.mark.real
def test_vectors_of_a_real_model(real: Daemon) -> None:
    folder = real.folder / "hub" / "models--test--embedder" / "snapshots" / "0123456789abcdef"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModel.from_pretrained(folder)
    texts = ["hello", "the quick brown fox", "größer, 日本語"]
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=100) as client:
        reply = client.embeddings.create(model="test/embedder", input=texts)
        by_ids = client.embeddings.create(model="test/embedder", input=[tokenizer.encode(text).ids for text in texts])
        cards = {model.id: model for model in client.models.list()}
    assert reply.usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in texts)
    for text, entry, same in zip(texts, reply.data, by_ids.data, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
        np.testing.assert_allclose(entry.embedding, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(same.embedding, expected, rtol=0, atol=1e-4)
    assert cards["test/embedder"].embeddings  # type: ignore[attr-defined]
    assert cards["test/chat"].embeddings is False  # type: ignore[attr-defined]


@pytest.mark.real
def test_chat_model_computes_no_embeddings(real: Daemon) -> None:
    response = real.http.post(f"{real.url}/v1/embeddings", json={"model": "test/chat", "input": "hi"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "embeddings_unsupported", "model")
    assert "test/chat is no embedding model" in error["message"]
    assert "test/chat" not in real.loaded(), "the files show it without a load"
