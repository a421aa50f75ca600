from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from localllm.app.chat.template.messages import Conversation, in_order
from localllm.app.chat.template.skeleton import MAX_TAIL, shape_of, skeleton_of


def call(identifier: str, arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": "get", "arguments": arguments}}


def round_of_calls(number: int, *arguments: str, text: str = "") -> list[dict[str, Any]]:
    """A message with calls, and their results."""
    calls = [call(f"{number}.{index}", value) for index, value in enumerate(arguments)]
    results = [{"role": "tool", "tool_call_id": entry["id"], "content": "x"} for entry in calls]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


def user(text: str = "x") -> dict[str, Any]:
    return {"role": "user", "content": text}


def session(chance: random.Random, count: int) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "x"}, user()]
    for number in range(count):
        kind = chance.randrange(6)
        if kind == 0:
            messages += [{"role": "assistant", "content": "x"}, user()]
        elif kind == 1:
            messages += round_of_calls(number, "{}", text="x")
        else:
            messages += round_of_calls(number, *['{"a": 1}'] * (1 + kind % 2))
    return in_order(messages)


def kinds(messages: Sequence[dict[str, Any]]) -> list[tuple[str, bool, int]]:
    return [(entry["role"], bool(entry["content"]), len(entry.get("tool_calls", ()))) for entry in messages]


def test_a_skeleton_has_the_same_successive_messages_as_the_conversation() -> None:
    for seed in range(20):
        messages = session(random.Random(seed), 60)
        likeness = skeleton_of(Conversation(messages)).conversation.messages
        assert set(pairwise(kinds(likeness))) == set(pairwise(kinds(messages)))
        assert kinds(likeness)[0] == kinds(messages)[0]
        assert kinds(likeness)[-1] == kinds(messages)[-1]


def test_results_in_a_skeleton_have_the_ids_of_its_calls() -> None:
    likeness = skeleton_of(Conversation(session(random.Random(0), 60))).conversation.messages
    ids: list[str] = []
    for message in likeness:
        if message["role"] == "tool":
            assert message["tool_call_id"] == ids.pop(0)
        else:
            assert not ids
            ids = [entry["id"] for entry in message.get("tool_calls", ())]


def test_the_skeleton_of_a_long_session_is_short() -> None:
    """The skeleton is short even if no sequence of messages repeats exactly."""
    for count in (1_000, 5_000):
        conversation = Conversation(session(random.Random(0), count))
        assert len(skeleton_of(conversation).conversation.messages) < 150
    assert len(shape_of(conversation, {"text": "x" * 10_000})) <= 32


def test_sessions_of_different_length_have_few_shapes() -> None:
    messages = [user()]
    shapes = []
    for number in range(50):
        messages += round_of_calls(number, "{}")
        shapes.append(shape_of(Conversation(messages), {}))
    assert len(set(shapes)) == 2
    assert len(set(shapes[1:])) == 1


def test_shapes_differ_if_a_template_may_treat_them_differently() -> None:
    base = [user(), *round_of_calls(0, "{}")]
    variants = [
        base,
        base[:-1],
        [user(""), *base[1:]],
        [user(), user(), *base[1:]],
        [user(), *round_of_calls(0, '{"a": 1}')],
        [user(), *round_of_calls(0, "[1]")],
        [user(), *round_of_calls(0, "oops")],
        [user(), *round_of_calls(0, "{}", "{}")],
        [user(), *round_of_calls(0, "{}", text="x")],
        [user(), base[1] | {"reasoning_content": "x"}, base[2]],
    ]
    shapes = {shape_of(Conversation(messages), {}) for messages in variants}
    shapes |= {shape_of(Conversation(base, tools), {}) for tools in ([], [{"function": {"name": "f"}}])}
    shapes.add(shape_of(Conversation(base), {"enable_thinking": False}))
    assert len(shapes) == len(variants) + 3


def test_the_tail_is_the_text_after_the_last_message() -> None:
    skeleton = skeleton_of(Conversation([user()]))
    word = skeleton.conversation.messages[0]["content"]
    assert skeleton.tail(f"<user>{word}</><assistant>") == "</><assistant>"
    assert skeleton.tail("<assistant>") == ""
    assert len(skeleton.tail(word + "x" * 10**6)) == MAX_TAIL
