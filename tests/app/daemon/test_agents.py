"""Agents with the clients of OpenAI and Anthropic: a real worker runs a model that writes a known text.

An agent asks, the model plans and calls two tools at once, the agent sends their results, and the model answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from .agent_model import ANSWER, CALLS, MODEL, PARAMETERS, PLAN, QUESTION, RESULTS, serve
from .conftest import Daemon

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # Anthropic's client has no such parameter
Turn = tuple[str, list[tuple[str, dict[str, Any]]]]  # the text and the calls of an answer


@pytest.fixture(scope="module")
def daemon(short_folder: Callable[[], Path]) -> Iterator[Daemon]:
    yield from serve(short_folder())


@pytest.fixture(scope="module")
def openai_client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="any", max_retries=0, timeout=100) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=daemon.url, api_key="any", max_retries=0, timeout=100) as client:
        yield client


def chat_turns(client: openai.OpenAI, *, stream: bool) -> Iterator[Turn]:
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        options: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools, "temperature": 0}
        if stream:
            with client.chat.completions.stream(**options) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**options).choices[0].message
        calls = message.tool_calls or []
        arguments = [json.loads(call.function.arguments) for call in calls]
        yield message.content, [(call.function.name, each) for call, each in zip(calls, arguments, strict=True)]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": RESULTS[each["city"]]}
            for call, each in zip(calls, arguments, strict=True)
        ]


def response_turns(client: openai.OpenAI, *, stream: bool, stored: bool) -> Iterator[Turn]:
    """`stored`: the next request names the response, instead of its items."""
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: dict[str, Any] = {}
    while True:
        options: dict[str, Any] = {"model": MODEL, "input": items, "tools": tools, "temperature": 0, "store": stored}
        if stream:
            with client.responses.stream(**options, **previous) as events:
                response: Any = events.get_final_response()
        else:
            response = client.responses.create(**options, **previous)
        calls = [item for item in response.output if item.type == "function_call"]
        arguments = [json.loads(call.arguments) for call in calls]
        yield response.output_text, [(call.name, each) for call, each in zip(calls, arguments, strict=True)]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[each["city"]]}
            for call, each in zip(calls, arguments, strict=True)
        ]
        previous = {"previous_response_id": response.id} if stored else {}
        items = results if stored else [*items, *response.output, *results]


def message_turns(client: anthropic.Anthropic, *, stream: bool) -> Iterator[Turn]:
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        options: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 4096, **GREEDY}
        if stream:
            with client.messages.stream(**options) as events:
                message: Any = events.get_final_message()
        else:
            message = client.messages.create(**options)
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        yield text, [(call.name, call.input) for call in calls]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": RESULTS[call.input["city"]]} for call in calls
        ]
        messages += [message.to_param(), {"role": "user", "content": results}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses", "stored responses", "messages"])
def test_agent(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic, protocol: str, stream: bool
) -> None:
    turns = {
        "chat": lambda: chat_turns(openai_client, stream=stream),
        "responses": lambda: response_turns(openai_client, stream=stream, stored=False),
        "stored responses": lambda: response_turns(openai_client, stream=stream, stored=True),
        "messages": lambda: message_turns(anthropic_client, stream=stream),
    }[protocol]()
    assert next(turns) == (PLAN, CALLS)
    assert next(turns) == (ANSWER, [])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_call(anthropic_client: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    message = anthropic_client.messages.create(
        model=MODEL,
        max_tokens=200,
        tools=tools,
        tool_choice=choice | {"disable_parallel_tool_use": True},
        messages=[{"role": "user", "content": "stop"}],
        **GREEDY,
    )
    (call,) = message.content
    assert (call.type, message.stop_reason) == ("tool_use", "tool_use")


def test_ends_of_a_message(anthropic_client: anthropic.Anthropic) -> None:
    def ends(max_tokens: int, *stops: str) -> tuple[str, str | None, str | None, int]:
        message = anthropic_client.messages.create(
            model=MODEL,
            max_tokens=max_tokens,
            stop_sequences=stops,
            messages=[{"role": "user", "content": "stop"}],
            **GREEDY,
        )
        texts = [block.text for block in message.content if block.type == "text"]
        return "".join(texts), message.stop_reason, message.stop_sequence, message.usage.output_tokens

    assert ends(4096)[:3] == ("one END two", "end_turn", None)
    assert ends(4096, "END", "never")[:3] == ("one ", "stop_sequence", "END")
    assert ends(2)[1:] == ("max_tokens", None, 2)


def test_counted_tokens_are_those_of_the_prompt(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    messages: Any = [{"role": "user", "content": "stop"}]
    for more in ({}, {"tools": tools}, {"tools": tools, "tool_choice": {"type": "any"}}):
        options: Any = {"model": MODEL, "messages": messages, "system": "Be brief.", **more}
        usage = anthropic_client.messages.create(max_tokens=1, **options).usage
        total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert anthropic_client.messages.count_tokens(**options).input_tokens == total
    response = openai_client.responses.create(model=MODEL, input="stop", max_output_tokens=16)
    assert response.usage is not None
    assert (
        openai_client.responses.input_tokens.count(model=MODEL, input="stop").input_tokens
        == response.usage.input_tokens
    )
