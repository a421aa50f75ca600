from __future__ import annotations

from typing import Any

import pytest

from localllm.app.chat.messages import for_template
from localllm.app.errors import InvalidRequest, UnsupportedParameter


def shape(*messages: object, knows_developer: bool = False) -> list[dict[str, Any]]:
    return for_template(messages, knows_developer=knows_developer)


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def test_developer_becomes_system_unless_known() -> None:
    message = {"role": "developer", "content": "be brief"}
    assert shape(message) == [{"role": "system", "content": "be brief"}]
    assert shape(message, knows_developer=True) == [message]


def test_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert shape({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{}", {}),
        ("", ""),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ('{"a": ' * 5000, '{"a": ' * 5000),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_arguments_become_objects_where_they_can(arguments: object, expected: object) -> None:
    (message,) = shape(call(arguments))
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}]


def test_tool_answers_and_reasoning_are_kept() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "18 °C"}
    thought = {"role": "assistant", "content": "ok", "reasoning": "hm"}
    assert shape(tool, thought) == [tool, {"role": "assistant", "content": "ok", "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_refusals_name_the_place(message: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shape(message)
    assert caught.value.param == param


def test_other_parts_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(UnsupportedParameter, match="image_url") as caught:
        shape({"role": "user", "content": parts})
    assert caught.value.param == "messages[0].content[1].type"


def test_no_messages() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        shape()
