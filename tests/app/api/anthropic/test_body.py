"""Messages of Anthropic's API as chats: every field has its effect, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.app.api.anthropic.body import MessagesBody, ask
from localllm.app.api.body import decode
from localllm.app.errors import AppError, ContextTooLong, InvalidRequest
from localllm.app.frames import Generate, ResponseFormat

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "add", "input_schema": {"type": "object"}}
PLAIN = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [1, None]}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}


def frame(**body: Any) -> Generate:
    (frame,) = ask(
        decode(json.dumps({"model": "m", "max_tokens": 7, "messages": HI} | body).encode(), MessagesBody)
    ).requests
    return frame


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({}, "max_tokens", 7),
        ({}, "fit_max_tokens", True),
        ({}, "messages", HI),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 3}, "top_k", 3),
        ({"stop_sequences": ["a", "b"]}, "stop", ["a", "b"]),
        ({"stop_sequences": []}, "stop", []),
        ({"tools": [TOOL]}, "tools", [PLAIN]),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "forced_tools", []),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "forced_tools", [PLAIN]),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}, "forced_tools", [PLAIN]),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "tools", []),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "parallel_tool_calls", True),
        (
            {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            "parallel_tool_calls",
            False,
        ),
        ({"thinking": {"type": "disabled"}}, "reasoning", "none"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            "reasoning",
            "on",
        ),
        ({"output_config": {"effort": "high"}}, "reasoning", "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "reasoning", "none"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}},
            "response_format",
            ResponseFormat(kind="json_schema", schema={"a": 1}),
        ),
        (
            {
                "system": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ]
            },
            "messages",
            [{"role": "system", "content": "a\nb"}, *HI],
        ),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "continue_final_message", True),
    ],
)
def test_fields_of_the_frame(body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(frame(**body), field) == value


def test_an_agent_s_conversation() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    texts = [{"type": "text", "text": "I ", "citations": None}, {"type": "text", "text": "look."}]
    messages = [
        *HI,
        {"role": "assistant", "content": [thinking, *texts, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}, {"type": "text", "text": "so?"}]},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "go on"},
    ]
    function = {"name": "add", "arguments": '{"a":[1,null]}'}
    assert frame(messages=messages, tools=[TOOL]).messages == [
        *HI,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": "and?\nso?"},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "go on"},
    ]


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*HI, {"role": "user", "content": [RESULT]}]}, "messages[1].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [USE | {"input": DEEP}]}, *HI]},
            "messages[1].content.input",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": 3e9}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": DEEP}}}, "output_config.format.schema"),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "thinking.display"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"service_tier": "batch"}, "service_tier"),
    ],
)
def test_refuses_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        frame(**body)
    assert refused.value.param == param


def test_an_error_of_the_worker_has_the_names_of_the_body() -> None:
    body = {"model": "m", "max_tokens": 7, "system": "s", "messages": HI}
    explain = ask(decode(json.dumps(body).encode(), MessagesBody)).explain
    error = explain(ContextTooLong("messages are too long", param="messages", n_ctx=4))
    assert (error.param, error.numbers, error.code) == ("messages", {"n_ctx": 4}, "context_length_exceeded")
    error = explain(InvalidRequest("messages[1].content: no", param="messages[1].content"))
    assert (error.param, error.message) == ("messages[0].content", "messages[0].content: no")
    assert explain(AppError("x")).param is None
