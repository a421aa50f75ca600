"""Ollama's API with Ollama's client, through a real socket."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from .conftest import Daemon

MODEL = "test/echo"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    with ollama.Client(host=daemon.url, trust_env=False) as client:
        yield client


def say(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


def frame_of(text: str | None) -> dict[str, Any]:
    """The frame of a request as the worker received it (script `body`)."""
    frame: dict[str, Any] = json.loads(text or "")
    return frame


def test_chat(client: ollama.Client) -> None:
    answer = client.chat(MODEL, say("echo hello there"))
    assert (answer.message.role, answer.message.content, answer.model) == ("assistant", "hello there ", MODEL)
    assert (answer.done, answer.done_reason, answer.prompt_eval_count, answer.eval_count) == (True, "stop", 3, 2)
    assert (answer.total_duration or 0) >= (answer.load_duration or 0) > 0
    assert client.chat(f"{MODEL}:latest", say("echo a")).message.content == "a "


def test_streamed_chat(client: ollama.Client) -> None:
    *parts, last = client.chat(MODEL, say("echo a b"), stream=True)
    assert [part.message.content for part in parts] == ["a ", "b "]
    assert all(part.done is False for part in parts)
    assert (last.done, last.done_reason, last.eval_count, last.message.content) == (True, "stop", 2, "")


async def test_async_client(daemon: Daemon) -> None:
    async with ollama.AsyncClient(host=daemon.url, trust_env=False) as client:
        stream = await client.chat(MODEL, say("echo a b"), stream=True)
        assert "".join([part.message.content or "" async for part in stream]) == "a b "


@pytest.mark.parametrize("stream", [False, True])
def test_thinking(client: ollama.Client, stream: bool) -> None:
    answer: Any = client.chat(MODEL, say("think"), think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "hm so"
    assert "".join(part.message.content or "" for part in parts) == "done"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client: ollama.Client, stream: bool) -> None:
    def add(a: int) -> int:
        """Add.

        Args:
            a: a number
        """
        return a

    answer: Any = client.chat(MODEL, say("call"), tools=[add], stream=stream)
    parts = list(answer) if stream else [answer]
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1}), ("subtract", {"a": 1})]
    messages = [part.message for part in parts if part.message.tool_calls]
    assert len(messages) == (2 if stream else 1)

    results = [
        {"role": "tool", "content": str(number), "tool_name": name} for number, name in enumerate(("subtract", "add"))
    ]
    if not stream:
        history = [*say("x"), messages[0], *results, *say("body")]
        frame = frame_of(client.chat(MODEL, history).message.content)
        ids = [message.get("tool_call_id") for message in frame["messages"]]
        assert ids[2:4] == [call["id"] for call in reversed(frame["messages"][1]["tool_calls"])]


def test_options_format_and_think_reach_the_worker(client: ollama.Client) -> None:
    options = {"temperature": 0.5, "num_predict": 7, "stop": ["x"], "seed": 3, "num_ctx": 32, "repeat_penalty": 1.5}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    frame = frame_of(client.chat(MODEL, say("body"), options=options, format=schema, think="low").message.content)
    expected = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "seed": 3, "repetition_penalty": 1.5}
    assert frame | expected | {"reasoning": "low"} == frame
    assert frame["response_format"] == {"kind": "json_schema", "schema": schema}
    json_frame = frame_of(client.generate(MODEL, "body", format="json", options={"num_predict": -1}).response)
    assert json_frame["response_format"] == {"kind": "json_object"}
    assert "max_tokens" not in json_frame


def test_generate(client: ollama.Client) -> None:
    answer = client.generate(MODEL, "echo a b")
    assert (answer.response, answer.done, answer.done_reason) == ("a b ", True, "stop")
    *parts, last = client.generate(MODEL, "echo a b", stream=True)
    assert ([part.response for part in parts], last.done) == (["a ", "b "], True)
    frame = frame_of(client.generate(MODEL, "body", system="be brief").response)
    assert [message["role"] for message in frame["messages"]] == ["system", "user"]
    raw = frame_of(client.generate(MODEL, "body", raw=True).response)
    assert (raw["prompt"], raw.get("messages")) == ("body", None)
    entries = client.generate(MODEL, "echo a", logprobs=True, top_logprobs=2).logprobs or []
    assert [(entry.token, len(entry.top_logprobs or ())) for entry in entries] == [("a ", 2)]


def test_empty_requests_load_and_unload_the_model(client: ollama.Client, daemon: Daemon) -> None:
    for answer in (client.generate(MODEL, keep_alive="1h"), client.chat(MODEL, [], keep_alive=3600)):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert 3500 < daemon.loaded()[MODEL]["unload_in"] <= 3600
    running = {model.model: model for model in client.ps().models}
    assert running[MODEL].context_length == 64
    client.generate(MODEL, keep_alive=-1)
    assert daemon.loaded()[MODEL]["unload_in"] is None
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    for _ in range(100):
        if MODEL not in daemon.loaded():
            return
        time.sleep(0.1)
    pytest.fail("the model stays loaded")


def test_embeddings(client: ollama.Client) -> None:
    vectors = client.embed(MODEL, ["a", "bb"])
    assert [list(vector)[:1] for vector in vectors.embeddings] == [[1.0], [2.0]]
    assert (vectors.model, vectors.prompt_eval_count) == (MODEL, 3)
    assert client.embed(MODEL, "ccc").embeddings[0][0] == 3.0
    assert client.embed(MODEL, "c", dimensions=5).embeddings[0][2] == 5.0
    assert client.embed(MODEL, []).embeddings == []
    assert client.embeddings(MODEL, "dddd").embedding[0] == 4.0


def test_models(client: ollama.Client, daemon: Daemon) -> None:
    models = {model.model: model for model in client.list().models}
    assert len(models["guide"].digest or "") == 64
    assert MODEL not in models, "it has a problem"
    shown = client.show("guide")
    assert shown.capabilities is not None
    assert "completion" in shown.capabilities
    information = shown.modelinfo or {}
    assert information[f"{information['general.architecture']}.context_length"] > 0
    assert httpx.get(f"{daemon.url}/api/version").json()["version"]
    assert httpx.head(daemon.url).status_code == 200


def test_changes_need_the_key_or_the_socket(client: ollama.Client, daemon: Daemon) -> None:
    for change in (lambda: client.delete(MODEL), lambda: client.copy(MODEL, "x"), lambda: client.pull(MODEL)):
        with pytest.raises(ollama.ResponseError) as refused:
            change()
        assert refused.value.status_code == 403
    with daemon.local() as local:
        assert local.post("/api/copy", json={"source": MODEL, "destination": "short:latest"}).status_code == 200
        assert client.chat("short", say("echo a")).message.content == "a "
        lines = local.post("/api/pull", json={"model": "guide"}).text.splitlines()
        assert [json.loads(line)["status"] for line in lines][-1] == "success"
        assert local.request("DELETE", "/api/delete", json={"name": "test/slow"}).status_code == 200
        response = local.request("DELETE", "/api/delete", json={"name": "test/slow"})
        assert (response.status_code, isinstance(response.json()["error"], str)) == (404, True)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "test/eccho", "messages": say("x")}, 404, "test/eccho"),
        ("chat", {"messages": say("x")}, 400, "model"),
        ("chat", {"model": MODEL, "messages": say("x"), "x": 1}, 400, "unknown parameter 'x'"),
        ("chat", {"model": MODEL, "messages": say("x"), "options": {"x": 1}}, 400, "options.x"),
        ("chat", {"model": MODEL, "messages": say("x"), "options": {"temperature": 3}}, 400, "temperature"),
        ("chat", {"model": MODEL, "messages": say("x"), "options": {"mirostat": 2}}, 400, "mirostat"),
        ("chat", {"model": MODEL, "messages": say("x"), "format": "xml"}, 400, "format"),
        ("chat", {"model": MODEL, "messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, 400, "images"),
        ("chat", {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]}, 400, "tool call"),
        ("chat", {"model": MODEL, "messages": say("refuse")}, 400, "context length"),
        ("chat", {"model": MODEL, "messages": say("fail"), "stream": False}, 500, "a step failed"),
        ("generate", {"model": MODEL, "prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("generate", {"model": MODEL, "prompt": "x", "context": [1]}, 400, "context"),
        ("generate", {"model": MODEL, "prompt": "x", "raw": True, "think": "low"}, 400, "think"),
        ("generate", {"model": MODEL, "prompt": "x", "suffix": "y", "system": "z"}, 400, "system"),
        ("generate", {"model": MODEL, "prompt": "x", "keep_alive": "soon"}, 400, "keep_alive"),
        ("embed", {"model": MODEL, "input": [1]}, 400, "input"),
        ("show", {"model": "/etc"}, 404, "/etc"),
        ("create", {"model": "x"}, 404, "unknown route"),
    ],
)
def test_errors_are_one_text(daemon: Daemon, path: str, body: dict[str, Any], status: int, words: str) -> None:
    response = httpx.post(f"{daemon.url}/api/{path}", json=body)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]


def test_error_in_a_stream_is_its_last_line(daemon: Daemon) -> None:
    response = httpx.post(f"{daemon.url}/api/chat", json={"model": MODEL, "messages": say("fail")})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert "a step failed" in json.loads(response.text.splitlines()[-1])["error"]


def test_ignored_options_are_named(daemon: Daemon) -> None:
    body = {"model": MODEL, "messages": say("echo a"), "options": {"num_ctx": 8, "num_thread": 2}}
    response = httpx.post(f"{daemon.url}/api/chat", json=body)
    assert response.headers["x-localllm-ignored"] == "options.num_ctx, options.num_thread"
