"""Anthropic's API with Anthropic's client, through a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from .conftest import Daemon

MODEL = "test/echo"
TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("add", "subtract")]


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=daemon.url, api_key="any", max_retries=0) as client:
        yield client


def create(client: anthropic.Anthropic, words: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": words}]
    return client.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": messages} | more)


def blocks(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in message.content]


CALLS = [
    {"type": "tool_use", "id": f"call_{index}", "name": name, "input": {"a": 1}}
    for index, name in enumerate(("add", "subtract"))
]
ANSWERS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "echo hello there": ([{"type": "text", "text": "hello there "}], "end_turn"),
    "think": (
        [{"type": "thinking", "thinking": "hm so", "signature": "localllm"}, {"type": "text", "text": "done"}],
        "end_turn",
    ),
    "call": (CALLS, "tool_use"),
}


@pytest.mark.parametrize("words", ANSWERS)
def test_answer_streamed_or_not(client: anthropic.Anthropic, words: str) -> None:
    whole = create(client, words, tools=TOOLS)
    assert (blocks(whole), whole.stop_reason, whole.stop_sequence) == (*ANSWERS[words], None)
    assert (whole.model, whole.role, whole.type) == (MODEL, "assistant", "message")
    assert whole.id.startswith("msg_")
    count = len(words.split())
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (count - 1, 1)
    messages: list[Any] = [{"role": "user", "content": words}]
    with client.messages.stream(model=MODEL, max_tokens=9, messages=messages, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert blocks(final) == blocks(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (count - 1, 1)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(final.content)


def test_answers_can_be_sent_back(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "call"}]
    first = create(client, "call", tools=TOOLS)
    messages.append(first.to_param())
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "2", "is_error": block.name == "add"}
        for block in first.content
    ]
    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "body"}]})
    frame = json.loads(create(client, "", messages=messages, tools=TOOLS, system="be brief").content[0].text)
    roles = ["system", "user", "assistant", "tool", "tool", "user"]
    assert [message["role"] for message in frame["messages"]] == roles
    assert [message["content"] for message in frame["messages"]] == ["be brief", "call", "", "Error: 2", "2", "body"]


def test_the_tool_runner_of_the_client(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds."""
        return str(a)

    messages: list[Any] = [{"role": "user", "content": "echo a"}]
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=9, tools=[add], messages=messages)
    assert blocks(runner.until_done()) == [{"type": "text", "text": "a "}]


def test_count_of_tokens(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "one two three"}])
    assert count.input_tokens == 3


def test_fields_without_effect_are_named(daemon: Daemon) -> None:
    text = {"type": "text", "text": "echo a", "cache_control": {"type": "ephemeral", "scope": "global"}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [text]}],
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "context_management": {"edits": []},
    }
    answer = body | {"max_tokens": 9, "metadata": {"user_id": "a"}, "service_tier": "auto", "diagnostics": {}}
    names = {"context_management", "messages.content.cache_control", "thinking.budget_tokens"}
    for path, sent, more in (("", answer, {"metadata", "diagnostics"}), ("/count_tokens", body, set())):
        reply = daemon.http.post(f"{daemon.url}/v1/messages{path}?beta=true", json=sent)
        assert reply.status_code == 200, reply.text
        assert set(reply.headers["x-localllm-ignored"].split(", ")) == names | more
    reply = daemon.http.post(f"{daemon.url}/v1/messages/count_tokens", json=body | {"load": {}})
    assert reply.json()["error"]["param"] == "load"


def test_errors_have_the_form_of_anthropic(daemon: Daemon, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(client, "echo a", model="no/model")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refused:
        create(client, "refuse")
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"], body["error"]["param"]) == (
        "error",
        "invalid_request_error",
        "messages",
    )
    with pytest.raises(anthropic.APIStatusError, match="a step failed"):
        create(client, "fail", stream=False)
    with pytest.raises(anthropic.APIStatusError, match="a step failed"):
        list(create(client, "fail", stream=True))
    for method, path in (("GET", "/v1/messages"), ("POST", "/v1//messages/nothing"), ("POST", "/v1/messages")):
        reply = httpx.request(method, daemon.url + path)
        assert reply.status_code in (404, 405, 415)
        assert reply.json()["type"] == "error"
