"""OpenAI's Responses with OpenAI's client, through a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from ...waiting import wait_until
from .conftest import Daemon

MODEL = "test/echo"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {}, "strict": False} for name in ("add", "subtract")
]


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, words: Any, **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=words, **more)


def frame_of(response: Any) -> dict[str, Any]:
    """The frame of a request as the worker received it (script `body`)."""
    frame: dict[str, Any] = json.loads(response.output_text)
    return frame


def shapes(response: Any) -> list[tuple[str, str]]:
    """The type of each output item, and its text."""
    items = []
    for item in response.output:
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert (item.status, item.id[item.id.index("_") :]) == ("completed", f"_{response.id[5:]}_{len(items)}")
        items.append((item.type, text))
    return items


OUTPUTS = {
    "echo hello there": [("message", "hello there ")],
    "think": [("reasoning", "hm so"), ("message", "done")],
    "call": [("function_call", '{"a": 1}'), ("function_call", '{"a": 1}')],
}
OF_TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
OF_REASONING = ["content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done", "content_part.done"]
OF_CALL = [*["function_call_arguments.delta"] * 2, "function_call_arguments.done"]
EVENTS = {
    "echo hello there": [[*OF_TEXT[:2], *OF_TEXT[1:]]],
    "think": [OF_REASONING, OF_TEXT],
    "call": [OF_CALL, OF_CALL],
}


@pytest.mark.parametrize("words", OUTPUTS)
def test_response_streamed_or_not(client: openai.OpenAI, words: str) -> None:
    whole = create(client, words, tools=TOOLS)
    assert (shapes(whole), whole.status, whole.model) == (OUTPUTS[words], "completed", MODEL)
    usage = whole.usage
    count = len(words.split())
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (count, 1)
    assert usage.output_tokens_details.reasoning_tokens == (2 if words == "think" else 0)
    assert client.responses.retrieve(whole.id) == whole
    with client.responses.stream(model=MODEL, input=words, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shapes(final) == OUTPUTS[words]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items = [["output_item.added", *middle, "output_item.done"] for middle in EVENTS[words]]
    expected = ["created", "in_progress", *[name for item in items for name in item], "completed"]
    assert [event.type.removeprefix("response.") for event in events] == expected
    stored = client.responses.retrieve(final.id)
    assert (stored.output_text, stored.usage) == (final.output_text, final.usage)


def test_chain_of_responses(client: openai.OpenAI) -> None:
    first = create(client, "call", tools=TOOLS, instructions="first", metadata={"a": "b"})
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in first.output]
    second = create(client, results, previous_response_id=first.id, tools=TOOLS)
    assert second.previous_response_id == first.id
    frame = frame_of(create(client, "body", previous_response_id=second.id, instructions="now"))
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["role"] for message in frame["messages"]][: len(roles) - 2] == roles[:-2]
    assert frame["messages"][0]["content"] == "now"
    assert [call["id"] for call in frame["messages"][2]["tool_calls"]] == ["call_0", "call_1"]
    assert first.metadata == {"a": "b"}


def test_items_can_be_sent_back_or_referred_to(client: openai.OpenAI) -> None:
    first = create(client, "think", include=["reasoning.encrypted_content"])
    sent_back = [*[item.model_dump() for item in first.output], {"role": "user", "content": "body"}]
    (answer, _) = frame_of(create(client, sent_back))["messages"]
    assert answer == {"role": "assistant", "content": "done", "reasoning_content": "hm so"}
    sent_back[0]["content"] = None  # clients that keep the encrypted text only
    assert frame_of(create(client, sent_back))["messages"][0] == answer
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = create(client, [*references, sent_back[-1]])
    assert frame_of(second)["messages"][0] == answer
    assert frame_of(create(client, "body", previous_response_id=second.id))["messages"][0] == answer
    with pytest.raises(openai.BadRequestError, match="twice"):
        create(client, references * 2)
    with pytest.raises(openai.BadRequestError) as missing:
        create(client, [{"type": "item_reference", "id": first.output[0].id[:-1] + "9"}])
    assert missing.value.param == "input[0]"


def test_stored_responses(client: openai.OpenAI) -> None:
    words: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    response = create(client, words)
    items = [
        item
        for page in client.responses.input_items.list(response.id, limit=2, order="asc").iter_pages()
        for item in page.data
    ]
    assert [item.content[0].text for item in items] == ["a", "b", "c"]
    assert len({item.id for item in items}) == 3
    newest = client.responses.input_items.list(response.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (items[2].id, True)
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            call(response.id)
    with pytest.raises(openai.BadRequestError) as missing:
        create(client, "a", previous_response_id=response.id)
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")
    stateless = create(client, "a", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stateless.id)


def test_responses_survive_a_restart(start_daemon: Callable[..., Daemon]) -> None:
    first = start_daemon()
    body = {"model": MODEL, "input": "echo a"}
    reply = first.http.post(f"{first.url}/v1/responses", json=body).json()
    folder = first.folder
    first.stop()
    second = start_daemon(folder)
    assert second.http.get(f"{second.url}/v1/responses/{reply['id']}").json() == reply
    (file,) = folder.glob("data/**/responses.sqlite3")
    assert file.stat().st_mode & 0o777 == 0o600


def test_cancel(client: openai.OpenAI) -> None:
    stream = create(client, "hang", stream=True)
    begun = next(iter(stream)).response
    assert client.responses.retrieve(begun.id).status == "in_progress"
    assert client.responses.cancel(begun.id).status == "cancelled"
    *_, last = stream
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    ended = create(client, "echo a")
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(ended.id)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, "refuse")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as background:
        create(client, "a", background=True)
    assert background.value.param == "background"
    *_, last = create(client, "fail", stream=True)
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert client.responses.retrieve(last.response.id).status == "failed"


def test_structured_text(client: openai.OpenAI) -> None:
    class Sum(pydantic.BaseModel):
        total: int

    assert client.responses.parse(model=MODEL, input='echo {"total":4}', text_format=Sum).output_parsed == Sum(total=4)
    text: Any = {"format": {"type": "json_schema", "name": "sum", "schema": {"type": "object"}, "strict": True}}
    frame = frame_of(create(client, "body", text=text))
    assert frame["response_format"] == {"kind": "json_schema", "schema": {"type": "object"}, "strict": True}


def test_logprobs(client: openai.OpenAI) -> None:
    response = create(client, "echo a", include=["message.output_text.logprobs"], top_logprobs=2)
    (entry,) = response.output[0].content[0].logprobs
    assert (entry.token, [other.token for other in entry.top_logprobs]) == ("a ", ["t0", "t1"])


def test_count_of_tokens(client: openai.OpenAI) -> None:
    count = client.responses.input_tokens.count(model=MODEL, input="one two", instructions="three")
    assert count.input_tokens == 3


def test_the_fields_of_codex(daemon: Daemon) -> None:
    body = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "call"}]},
        ],
        "tools": [*TOOLS, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"x-codex-installation-id": "a"},
    }
    response = daemon.http.post(f"{daemon.url}/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert response.text.rstrip().splitlines()[-2] == "event: response.completed"
    ignored = set(response.headers["x-localllm-ignored"].split(", "))
    assert ignored == {"client_metadata", "prompt_cache_key", "reasoning.summary", "tools.web_search"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hang"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hang"}], "max_tokens": 9}),
    ],
)
def test_a_client_that_disconnects_ends_its_answer(daemon: Daemon, path: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", daemon.url + path, json={"model": MODEL, "stream": True} | body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert daemon.loaded()[MODEL]["requests"] == 1
    wait_until(lambda: daemon.loaded()[MODEL]["requests"] == 0)
