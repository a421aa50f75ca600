"""Bodies of the Responses API as chats: every field has its effect, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.app.api.body import decode
from localllm.app.api.responses.body import ResponsesBody
from localllm.app.api.responses.items import sealed
from localllm.app.api.responses.stored import ResponseStore
from localllm.app.errors import AppError
from localllm.app.frames import Generate, ResponseFormat

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
PLAIN = {"type": "function", "function": FUNCTION}
OTHER = {"type": "function", "name": "subtract"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": DEEP}


def frame(folder: Path, **body: Any) -> Generate:
    """The frame of a body, with a file of stored responses that does not exist."""
    decoded = decode(json.dumps({"input": "hi"} | body).encode(), ResponsesBody)
    store = ResponseStore(folder / "none")
    return decoded.resolved(store).converted(store).frame("id")


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({}, "messages", HI),
        ({"instructions": "be brief"}, "messages", [{"role": "system", "content": "be brief"}, *HI]),
        ({"max_output_tokens": 7}, "max_tokens", 7),
        ({"temperature": 0}, "temperature", 0.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_logprobs": 3}, "logprobs", 3),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", 0),
        ({"include": ["web_search_call.results"]}, "logprobs", None),
        ({"reasoning": {"effort": "low"}}, "reasoning", "low"),
        ({"text": {"verbosity": "low"}}, "verbosity", "low"),
        ({"text": {"format": {"type": "text"}}}, "response_format", None),
        ({"text": {"format": {"type": "json_object"}}}, "response_format", ResponseFormat(kind="json_object")),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": True}}},
            "response_format",
            ResponseFormat(kind="json_schema", schema={"a": 1}, strict=True),
        ),
        ({"tools": [TOOL, {"type": "web_search", "filters": {}}]}, "tools", [PLAIN]),
        ({"tools": [TOOL], "tool_choice": "required"}, "forced_tools", [PLAIN]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}}, "forced_tools", [PLAIN]),
        (
            {
                "tools": [OTHER, TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "add"}],
                },
            },
            "tools",
            [PLAIN],
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", False),
        (
            {"input": [{"role": "assistant", "content": "a"}] * 2},
            "messages",
            [{"role": "assistant", "content": "a"}] * 2,
        ),
    ],
)
def test_fields_of_the_frame(tmp_path: Path, body: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(frame(tmp_path, **body), field) == value


def test_items_of_the_assistant_are_one_message(tmp_path: Path) -> None:
    def message(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    items = [
        *HI,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        message("I look."),
        CALL,
        CALL | {"call_id": "c2"},
        message(" So."),
        RESULT | {"call_id": "c2"},
        RESULT | {"output": [{"type": "input_text", "text": "3"}]},
        {"type": "reasoning", "encrypted_content": sealed("ah")},
        message("Five."),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "oh"}]},
        message("Six."),
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    calls = [{"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in ("c1", "c2")]
    assert frame(tmp_path, input=items).messages == [
        *HI,
        {"role": "assistant", "content": "I look. So.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Five.", "reasoning_content": "ah"},
        {"role": "assistant", "content": "Six.", "reasoning_content": "oh"},
        {"role": "developer", "content": "a\nb"},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "message"}]}, "input[0]"),
        ({"input": [*HI, {"role": "wizard", "content": ""}]}, "input[1].role"),
        ({"input": [*HI, {"role": "user", "content": [{"type": "input_image"}]}]}, "input[1].content[0].type"),
        ({"input": [{"type": "custom_tool_call"}]}, "input[0].type"),
        ({"input": [{"type": []}]}, "input[0].type"),
        ({"input": [DEEP]}, "input[0]"),
        ({"input": [*HI, RESULT]}, "input[1].call_id"),
        ({"input": [*HI, CALL, *HI, RESULT], "instructions": "a"}, "input[3].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "localllm:%"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3e9}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"parameters": DEEP}]}, "tools[0].parameters"),
        ({"tools": [TOOL, TOOL]}, "tools[1]"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}},
            "tool_choice",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": DEEP}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"stop": "a"}, "stop"),
    ],
)
def test_refuses_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    with pytest.raises(AppError) as refused:
        frame(tmp_path, **body)
    assert (refused.value.param, refused.value.status) == (param, 400)
