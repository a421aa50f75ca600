from __future__ import annotations

import re
from typing import Any

import pytest

from localllm.app.chat.template import call_ids
from localllm.app.chat.template.call_ids import CallIds, IdStyle, call_count, with_ids

from .... import work

FOREIGN = ["call_0123456789abcdef01234567", "a", "toolu_01A", "functions.f:0", "call_0123456789abcdef01234568", ""]


def turn(*ids: str, name: str = "f") -> list[dict[str, Any]]:
    calls = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": "x"} for i in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def ids_of(messages: list[dict[str, Any]]) -> list[str]:
    """The ids of the calls; those of the results must be the same."""
    calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == calls
    return calls


def test_plain_ids_stay() -> None:
    messages = turn(*FOREIGN)
    assert with_ids(messages, "plain") == messages


def test_short_ids_have_nine_letters_or_digits_and_are_stable() -> None:
    ids = ids_of(with_ids(turn(*FOREIGN, "abcdefgh1"), "nine"))
    assert all(re.fullmatch("[A-Za-z0-9]{9}", name) for name in ids)
    assert len(set(ids)) == len(ids)
    assert ids[-1] == "abcdefgh1"
    again = ids_of(with_ids([*turn(*reversed(FOREIGN)), *turn("a")], "nine"))
    assert again == [*reversed(ids[:-1]), ids[1]]


def test_two_ids_never_get_one_short_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_ids, "_short", lambda name, attempt: f"{attempt:09}")
    ids = ids_of(with_ids(turn("a", "b", "000000001", "a"), "nine"))
    assert ids == ["000000000", "000000002", "000000001", "000000000"]


def test_ids_with_names_count_the_calls_of_the_conversation() -> None:
    messages = [*turn("x", "y", name="f"), {"role": "user", "content": "x"}, *turn("x", name="g.h")]
    assert ids_of(with_ids(messages, "functions")) == ["functions.f:0", "functions.f:1", "functions.g.h:2"]


def test_ids_with_the_right_name_stay() -> None:
    messages = turn("functions.f:1", "a", "functions.g:0", "functions.f:1", "functions.f:x")
    new = ["functions.f:1", "functions.f:2", "functions.f:3", "functions.f:4", "functions.f:5"]
    assert ids_of(with_ids(messages, "functions")) == new


def test_calls_without_results_and_with_one_id() -> None:
    messages = turn("a", "a")
    assert ids_of(with_ids(messages, "functions")) == ["functions.f:0", "functions.f:1"]
    (alone,) = with_ids(turn("a")[:1], "functions")
    assert alone["tool_calls"][0]["id"] == "functions.f:0"


def test_the_time_is_linear_in_the_number_of_calls() -> None:
    def executed(count: int) -> int:
        foreign = turn("a") * count
        named = [message for number in range(count) for message in turn(f"functions.f:{number}")]
        converted: list[list[Any]] = []
        executed = work.lines(lambda: converted.append(with_ids([*foreign, *named], "functions")))
        assert len(set(ids_of(converted[0]))) == 2 * count
        return executed

    assert executed(800) < 2.2 * executed(400)


@pytest.mark.parametrize(
    ("style", "pattern"), [("plain", "call_[0-9a-f]{24}"), ("nine", "[A-Za-z0-9]{9}"), ("functions", r"functions\.g:5")]
)
def test_new_ids_have_the_style_and_stay_in_the_next_turn(style: IdStyle, pattern: str) -> None:
    history = turn("a", "b", "c", "d")
    new = CallIds(style, call_count(history))
    name = new.new(1, "g")
    assert re.fullmatch(pattern, name)
    following = ids_of(with_ids([*history, *turn(new.new(0, "g"), name, name=("g"))], style))
    assert following[-1] == name
    assert style == "functions" or new.new(0, "g") != new.new(0, "g")
