"""Converts the messages of a frame to the form that chat templates expect. The API has validated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .call_ids import IdStyle, with_ids

# The arguments of calls. value: the value of the JSON text. object: the same, but never another value than an object.
# text: the JSON text.
ArgumentsForm = Literal["value", "object", "text"]


@dataclass(frozen=True)
class Conversation:
    """Messages and tools for a chat template, and the form in which the template needs calls."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: ArgumentsForm = "value"
    ids: IdStyle = "plain"

    @property
    def has_calls(self) -> bool:
        return any(message.get("tool_calls") for message in self.messages)

    def for_template(self) -> list[dict[str, Any]]:
        """The messages in the form that the template needs, as new dicts."""
        messages = with_ids(self.messages, self.ids)
        return [_with_reasoning(_with_arguments(message, self.arguments)) for message in messages]


def in_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, as new dicts, with the results of calls in the order of the calls.

    Calls without a result come after the others: a template without ids shows the results in the order of the calls.
    Each result gets the field `name`, the name of the function, unless it has one.
    """
    pending = [dict(message) for message in messages]
    pending.reverse()
    ordered = []
    while pending:
        message = pending.pop()
        results = []
        while message.get("tool_calls") and pending and pending[-1]["role"] == "tool":
            results.append(pending.pop())
        answered = []
        others = []
        sorted_results = []
        for call in message.get("tool_calls", ()):
            found = take_result(call, results)
            (answered if found else others).append(call)
            sorted_results += [{"name": call["function"]["name"]} | result for result in found]
        ordered += [message | {"tool_calls": answered + others} if answered else message, *sorted_results, *results]
    return ordered


def take_result(call: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the first result of the call from `results`. Returns a list with it; an empty list if there is none."""
    for index, message in enumerate(results):
        if message["tool_call_id"] == call["id"]:
            return [results.pop(index)]
    return []


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning in the fields of all templates."""
    reasoning = message.get("reasoning_content")
    return message | dict.fromkeys(("reasoning", "thinking"), reasoning) if reasoning else message


def _with_arguments(message: dict[str, Any], form: ArgumentsForm) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    functions = [function | {"arguments": _arguments(function["arguments"], form)} for function in functions]
    return message | {
        "tool_calls": [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    }


def arguments_text(text: str) -> str:
    """The JSON text of arguments that a model wrote. No arguments are an empty object, and a JSON string that has an
    object is this object."""
    value = _value(text)
    if isinstance(value, str) and isinstance(_value(value), dict):
        return value
    return "{}" if value is None or value == "" or not text.strip() else text


def _arguments(text: str, form: ArgumentsForm) -> object:
    """Arguments that a model wrote, in a form."""
    text = arguments_text(text)
    if form == "text":
        return text
    value = _value(text)
    return {"arguments": value} if form == "object" and not isinstance(value, dict) else value


def _value(text: str) -> object:
    """The value of a JSON text; a text that is not JSON is its own value."""
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value
