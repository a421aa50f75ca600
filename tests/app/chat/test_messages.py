from __future__ import annotations

from typing import Any

import pytest

from localllm.app.chat.messages import for_template


def convert(*messages: dict[str, Any], knows_developer: bool = False) -> list[dict[str, Any]]:
    return for_template(messages, knows_developer=knows_developer)


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def test_the_role_developer_becomes_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "be brief"}
    assert convert(message) == [{"role": "system", "content": "be brief"}]
    assert convert(message, knows_developer=True) == [message]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{}", {}),
        ("", ""),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ('{"a": ' * 5000, '{"a": ' * 5000),
    ],
)
def test_arguments_become_objects_if_they_are_json_objects(arguments: str, expected: object) -> None:
    (message,) = convert(call(arguments))
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}]


def test_other_fields_stay_unchanged() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "18 °C"}
    thought = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    assert convert(tool, thought) == [tool, thought]


def test_the_messages_of_the_frame_stay_unchanged() -> None:
    message = call("{}")
    convert(message)[0]["content"] += "x"
    assert message == call("{}")
