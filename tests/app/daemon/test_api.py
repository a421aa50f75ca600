"""The API with OpenAI's client, through a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import jsonschema
import openai
import pydantic
import pytest

from .conftest import Daemon
from .conftest import events as sent_events

MODEL = "test/echo"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def say(words: str) -> list[Any]:
    return [{"role": "user", "content": words}]


def frame_of(answer: str | None) -> dict[str, Any]:
    """The frame of a request as the worker received it (script `body`)."""
    return cast(dict[str, Any], json.loads(answer or ""))


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("echo hello there"))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello there ", "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert choice.logprobs is None


def test_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=say("echo a b"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    first, *middle, finish, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in middle] == ["a ", "b "]
    assert finish.choices[0].finish_reason == "stop"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_warnings_of_a_prompt_are_a_field_that_clients_ignore(daemon: Daemon, client: openai.OpenAI) -> None:
    expected = {"warnings": ["a token is there twice"]}
    for stream in (False, True):
        chat = client.chat.completions.create(model=MODEL, messages=say("echo twice"), stream=stream)
        text = client.completions.create(model=MODEL, prompt="echo twice", stream=stream)
        for answer in (chat, text):
            events: list[Any] = list(answer) if stream else [answer]
            assert [event.model_extra for event in events] == [expected] * len(events)
    assert client.completions.create(model=MODEL, prompt="echo once").model_extra == {}
    vectors = client.embeddings.create(model=MODEL, input=["once", "twice", "twice"], encoding_format="float")
    assert vectors.model_extra == expected
    assert f"{MODEL}: a token is there twice" in daemon.log


def test_stream_has_usage_only_if_requested(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=say("echo a"), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_async_client(daemon: Daemon) -> None:
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=say("echo a b"))
        assert whole.choices[0].message.content == "a b "
        stream = await client.chat.completions.create(model=MODEL, messages=say("echo a b"), stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "a b "


def test_structured_output(client: openai.OpenAI) -> None:
    class Sum(pydantic.BaseModel):
        total: int

    answer = client.chat.completions.parse(model=MODEL, messages=say('echo {"total":4}'), response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(total=4)


def test_schema_reaches_the_worker(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=say("body"),
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}},
    )
    assert frame_of(answer.choices[0].message.content)["response_format"] == {
        "kind": "json_schema",
        "schema": schema,
    }


def test_extra_parameters_reach_the_worker(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=say("body"), extra_body={"top_k": 5, "min_p": 0.25, "ignore_eos": True, "regex": "a+"}
    )
    reply = frame_of(answer.choices[0].message.content)
    assert (reply["top_k"], reply["min_p"], reply["ignore_eos"]) == (5, 0.25, True)
    assert reply["response_format"] == {"kind": "regex", "regex": "a+"}


def test_n_gives_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say("echo a"), n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "a "), (1, "a "), (2, "a ")]
    chunks = list(client.chat.completions.create(model=MODEL, messages=say("echo a"), n=2, stream=True))
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "a "
        assert own[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    asking: dict[str, Any] = {"model": MODEL, "messages": say("echo a b"), "logprobs": True, "top_logprobs": 4}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **asking))
        entries = [
            entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
        ]
    else:
        logprobs = client.chat.completions.create(**asking).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert [entry.token for entry in entries] == ["a ", "b "]
    assert entries[0].bytes == [97, 32]
    assert entries[0].logprob == -0.5
    # JSON has no minus infinity
    assert [top.logprob for top in entries[0].top_logprobs] == [0.0, -1.0, -2.0, -9999.0]


def test_tool_calls(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("add", "subtract")]
    answer = client.chat.completions.create(model=MODEL, messages=say("call"), tools=tools)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [("call_0", "add", '{"a": 1}'), ("call_1", "subtract", '{"a": 1}')]

    # the message of an answer is valid in the next request
    earlier = [
        *say("x"),
        choice.message.model_dump(),
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=cast(Any, [*earlier, *say("body")]), tools=tools)
    assert frame_of(reply.choices[0].message.content)["messages"][1]["tool_calls"][0]["function"]["name"] == "add"


def test_streamed_tool_calls(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=say("call"), stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    for index, name in enumerate(("add", "subtract")):
        own = [delta for delta in deltas if delta.index == index]
        assert own[0].function is not None
        assert (own[0].id, own[0].type, own[0].function.name) == (f"call_{index}", "function", name)
        assert all(delta.id is None and delta.function and delta.function.name is None for delta in own[1:])
        assert "".join(delta.function.arguments or "" for delta in own if delta.function) == '{"a": 1}'
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_has_both_field_names(daemon: Daemon) -> None:
    message = daemon.chat("think").json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm so", "hm so", "done")
    deltas = [event["choices"][0]["delta"] for event in events(daemon.chat("think", stream=True))]
    assert {"reasoning": "hm ", "reasoning_content": "hm "} in deltas


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, split like clients that use str.splitlines."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_unusual_line_breaks_do_not_split_events(daemon: Daemon) -> None:
    response = daemon.chat("breaks", stream=True)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events(response))
    assert text == "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng"


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="echo a b", logprobs=2)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("a b ", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a ", "b "]
    assert choice.logprobs.text_offset == [0, 2]
    assert choice.logprobs.top_logprobs == [{"t0": 0.0, "t1": -1.0, token: -0.5} for token in ("a ", "b ")]


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["echo a", "echo b c"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a "),
        (1, "a "),
        (2, "b c "),
        (3, "b c "),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    assert client.completions.create(model=MODEL, prompt=[[7, 8], [9]]).choices[1].text == "9 "


def test_streamed_completion(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="echo a b", stream=True, logprobs=0))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "a b "
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks[:2] if chunk.choices[0].logprobs]
    assert offsets == [[0], [2]]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI, daemon: Daemon) -> None:
    models = {model.id: model for model in client.models.list()}
    assert MODEL in models
    assert models[MODEL].object == "model"
    assert models[MODEL].created > 0
    assert client.models.retrieve(MODEL).owned_by == "localllm"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("test/eccho")
    assert missing.value.code == "model_not_found"


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="test/eccho", messages=say("x"))
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    assert "test/echo" in cast(Any, missing.value.body)["hint"]


@pytest.mark.parametrize("stream", [False, True])
def test_context_overflow_has_status_400(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=say("refuse"), stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert "this model's maximum context length is" in refused.value.message
    body = cast(Any, refused.value.body)
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (99, 64)


def test_error_after_the_start_of_a_stream_is_an_event(client: openai.OpenAI, daemon: Daemon) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=say("fail"), stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "one "]
    with pytest.raises(openai.APIError, match="a step failed"):
        next(stream)
    assert "[DONE]" not in daemon.chat("fail", stream=True).text
    whole = daemon.chat("fail")
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert whole.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("words", "code"), [("silent", "internal_error"), ("stopped", "server_stopping")])
def test_answer_without_a_finish_reason_is_an_error(daemon: Daemon, words: str, code: str, stream: bool) -> None:
    response = daemon.chat(words, stream=stream)
    text = response.text.rpartition("data: ")[2] if stream else response.text
    assert json.loads(text)["error"]["code"] == code


def test_model_is_optional_if_one_is_loaded(daemon: Daemon) -> None:
    daemon.chat("echo a")
    url = f"{daemon.url}/v1/chat/completions"
    assert httpx.post(url, json={"messages": say("echo a")}).json()["model"] == MODEL
    daemon.chat("echo a", model="test/other")
    refused = httpx.post(url, json={"messages": say("echo a")})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "model"
    with daemon.local() as client:
        assert client.post("/admin/unload", json={"model": "test/other"}).status_code == 200


def test_tokenize_and_detokenize(daemon: Daemon) -> None:
    reply = httpx.post(f"{daemon.url}/v1/tokenize", json={"model": MODEL, "prompt": "one three"}).json()
    assert reply == {"count": 2, "max_model_len": 64, "tokens": [3, 5], "token_strs": ["one", "three"]}
    body = {"model": MODEL, "messages": say("one"), "add_special_tokens": False}
    assert httpx.post(f"{daemon.url}/tokenize", json=body).json()["count"] == 1
    reply = httpx.post(f"{daemon.url}/v1/detokenize", json={"model": MODEL, "tokens": [1, 2]}).json()
    assert reply == {"prompt": "x xx"}
    for path, body in (
        ("tokenize", {}),
        ("tokenize", {"prompt": "a", "messages": say("a")}),
        ("tokenize", {"messages": say("a"), "add_special_tokens": True}),
        ("detokenize", {"tokens": [5000]}),
        ("detokenize", {"tokens": ["a"]}),
    ):
        refused = httpx.post(f"{daemon.url}/v1/{path}", json={"model": MODEL} | body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", ["/chat/completions", "/v1//chat/completions", "//v1/chat/completions/"])
def test_path_with_extra_slashes_is_accepted(daemon: Daemon, path: str) -> None:
    body = {"model": MODEL, "messages": say("echo a")}
    assert httpx.post(daemon.url + path, json=body).json()["choices"][0]["message"]["content"] == "a "


def test_health_and_request_ids(daemon: Daemon) -> None:
    response = httpx.get(f"{daemon.url}/health")
    assert response.json()["status"] == "ok"
    assert response.headers["x-request-id"].startswith("req-")
    sane = httpx.get(f"{daemon.url}/health", headers={"X-Request-Id": "mine-7"})
    assert sane.headers["x-request-id"] == "mine-7"
    odd = httpx.get(f"{daemon.url}/health", headers={"X-Request-Id": "a b\tc"})
    assert odd.headers["x-request-id"].startswith("req-")


def test_metrics(daemon: Daemon) -> None:
    daemon.chat("echo a b")
    page = httpx.get(f"{daemon.url}/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    label = f'{{model="{MODEL}"}}'
    assert float(figures[f"localllm_generated_tokens_total{label}"]) >= 2
    assert float(figures[f"localllm_prompt_tokens_total{label}"]) >= 3
    assert float(figures[f"localllm_time_to_first_token_seconds_count{label}"]) >= 1
    assert float(figures[f"localllm_inter_token_seconds_count{label}"]) >= 1
    assert float(figures[f"localllm_preemptions_total{label}"]) == 7
    assert float(figures[f"localllm_late_compiles_total{label}"]) == 3
    assert float(figures[f"localllm_running{label}"]) == 0
    assert float(figures[f'localllm_requests_total{{model="{MODEL}",status="ok"}}']) >= 1


def test_openapi_describes_the_replies(daemon: Daemon) -> None:
    document = httpx.get(f"{daemon.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")

    def check(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    check(daemon.chat("call").json(), "ChatCompletion")
    check(daemon.chat("refuse").json(), "ErrorBody")
    check(httpx.post(f"{daemon.url}/api/chat", json={}).json(), "ErrorText")
    for event in events(daemon.chat("think", stream=True, stream_options={"include_usage": True})):
        check(event, "Chunk")
    check({"messages": say("x"), "temperature": 1, "stop": ["a"]}, "ChatBody")
    with pytest.raises(jsonschema.ValidationError):
        check({"messages": say("x"), "temprature": 1}, "ChatBody")
    for path, operations in document["paths"].items():
        method = next(iter(operations))
        assert "unknown route" not in httpx.request(method, daemon.url + path.replace("{id}", "x")).text, path


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "WORDS"}), ("/v1/messages", {"messages": say("WORDS"), "max_tokens": 9})],
)
def test_openapi_describes_the_replies_of_agents(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    document = httpx.get(f"{daemon.url}/openapi.json").json()
    replies = document["paths"][path]["post"]["responses"]

    def validate(value: Any, content: Any, media: str) -> None:
        schema = content["content"][media]["schema"] | {"components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    for words in ("think", "call", "refuse", "fail"):
        text = json.dumps(body | {"model": MODEL}).replace("WORDS", words)
        reply = httpx.post(daemon.url + path, content=text, headers={"Content-Type": "application/json"})
        validate(reply.json(), replies["200" if reply.is_success else "default"], "application/json")
        if words != "refuse":
            streamed = json.loads(text) | {"stream": True}
            for event in sent_events(httpx.post(daemon.url + path, json=streamed).text):
                validate(event, replies["200"], "text/event-stream")
