from __future__ import annotations

import json
from typing import Any

import pytest

from localllm.app.chat.template.messages import ArgumentsForm, Conversation, in_order

from .... import work


def call(arguments: str = "{}", identifier: str = "c1", name: str = "f") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def result(identifier: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


DEEP = '{"a": ' * 5000
ENCODED = json.dumps('{"a": 1}')


@pytest.mark.parametrize(
    ("text", "value", "as_object", "as_text"),
    [
        ('{"a": 1}', {"a": 1}, {"a": 1}, '{"a": 1}'),
        ("{}", {}, {}, "{}"),
        ("", {}, {}, "{}"),
        (" \n", {}, {}, "{}"),
        ("null", {}, {}, "{}"),
        ('""', {}, {}, "{}"),
        (ENCODED, {"a": 1}, {"a": 1}, '{"a": 1}'),
        ("[1]", [1], {"arguments": [1]}, "[1]"),
        ("7", 7, {"arguments": 7}, "7"),
        ('"a"', "a", {"arguments": "a"}, '"a"'),
        ("not json", "not json", {"arguments": "not json"}, "not json"),
        (DEEP, DEEP, {"arguments": DEEP}, DEEP),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}', {"arguments": '{"a": "\\ud800"}'}, '{"a": "\\ud800"}'),
        ('{"a": NaN}', '{"a": NaN}', {"arguments": '{"a": NaN}'}, '{"a": NaN}'),
        ('{"a": 1' + "0" * 30 + "}", {"a": 10**30}, {"a": 10**30}, '{"a": 1' + "0" * 30 + "}"),
    ],
)
def test_arguments_have_the_form_that_a_template_needs(
    text: str, value: object, as_object: object, as_text: str
) -> None:
    forms: list[tuple[ArgumentsForm, object]] = [("value", value), ("object", as_object), ("text", as_text)]
    for form, expected in forms:
        (message,) = Conversation([assistant(call(text))], arguments=form).for_template()
        assert message == assistant(call(text) | {"function": {"name": "f", "arguments": expected}})


def test_results_are_in_the_order_of_the_calls_and_have_names() -> None:
    calls = assistant(call(identifier="a", name="f"), call(identifier="b", name="g"), call(identifier="c", name="h"))
    after = {"role": "user", "content": "x"}
    ordered = in_order([calls, result("c", "3"), result("a", "1"), result("b", "2") | {"name": "own"}, after])
    named = [result("a", "1") | {"name": "f"}, result("b", "2") | {"name": "own"}, result("c", "3") | {"name": "h"}]
    assert ordered == [calls, *named, after]


def test_results_of_calls_with_one_id_keep_their_order() -> None:
    calls = assistant(call(identifier="a", name="f"), call(identifier="b", name="g"), call(identifier="a", name="h"))
    ordered = in_order([calls, result("a", "1"), result("a", "3"), result("b", "2")])
    assert [(message["name"], message["content"]) for message in ordered[1:]] == [("f", "1"), ("g", "2"), ("h", "3")]


def test_calls_of_other_messages_keep_their_results() -> None:
    first = [assistant(call(identifier="a")), result("a", "1")]
    second = [assistant(call(identifier="b"), call(identifier="a")), result("a", "3")]
    contents = [message["content"] for message in in_order([*first, *second]) if message["role"] == "tool"]
    assert contents == ["1", "3"]


def test_calls_without_a_result_come_last() -> None:
    """A template without ids would show the result of another call below them."""
    calls = assistant(call(identifier="a", name="f"), call(identifier="b", name="g"), call(identifier="c", name="h"))
    ordered = in_order([calls, result("c", "3")])
    assert [entry["id"] for entry in ordered[0]["tool_calls"]] == ["c", "a", "b"]
    assert ordered[1]["name"] == "h"
    assert in_order([calls]) == [calls]


def test_the_time_is_linear_in_the_number_of_results() -> None:
    def executed(count: int) -> int:
        names = [str(number) for number in range(count)]
        calls = assistant(*(call(identifier=name) for name in names))
        results = [result(name, "") for name in reversed(names)]
        ordered: list[Any] = []
        executed = work.lines(lambda: ordered.extend(in_order([calls, *results])))
        assert [message["tool_call_id"] for message in ordered[1:]] == names
        return executed

    assert executed(800) < 2.2 * executed(400)


def test_results_without_a_call_come_last() -> None:
    ordered = in_order(
        [assistant(call(identifier="a")), result("x", "1"), result("y", "2"), result("x", "3"), result("a", "4")]
    )
    assert [message["content"] for message in ordered[1:]] == ["4", "1", "2", "3"]


def test_the_messages_of_the_frame_stay_unchanged() -> None:
    message = assistant(call(""))
    conversation = Conversation(in_order([message]))
    conversation.messages[0]["content"] += "x"
    conversation.for_template()[0]["content"] += "y"
    assert message == assistant(call(""))
