"""Converts the messages of a frame to the form that chat templates expect. The API has validated them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..calls.records import FORMATS
from ..calls.writing import example
from .call_ids import IdStyle, with_ids

# The arguments of calls. value: the value of the JSON text. object: the same, but never another value than an object.
# text: the JSON text.
ArgumentsForm = Literal["value", "object", "text"]

HERMES = next(form for form in FORMATS if form.title == "hermes")


def hermes_text(calls: Sequence[dict[str, Any]]) -> str:
    """Calls in the format of Hermes, for a model whose format is unknown."""
    return example(HERMES, named_arguments(calls))


@dataclass(frozen=True)
class Conversation:
    """Messages and tools for a chat template, and the form in which the template needs calls.

    `calls_text` writes calls as the text of an answer, for templates that cannot show calls.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: ArgumentsForm = "value"
    ids: IdStyle = "plain"
    calls_text: Callable[[Sequence[dict[str, Any]]], str] = hermes_text

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
    pending = [dict(message) for message in reversed(messages)]
    ordered = []
    while pending:
        message = pending.pop()
        pairs, rest = pairs_of(message, take_results(pending))
        named = [{"name": call["function"]["name"]} | result for call, result in pairs if result]
        if named:
            message["tool_calls"] = [call for call, _ in sorted(pairs, key=lambda pair: pair[1] is None)]
        ordered += [message, *named, *rest]
    return ordered


def take_results(pending: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the results of calls at the end of `pending`, which has the messages in reverse order. Returns them."""
    results = []
    while pending and pending[-1]["role"] == "tool":
        results.append(pending.pop())
    return results


def pairs_of(
    message: dict[str, Any], results: Sequence[dict[str, Any]]
) -> tuple[list[tuple[dict[str, Any], dict[str, Any] | None]], list[dict[str, Any]]]:
    """The calls of a message, each with the first result that has its id, and the other results."""
    waiting: dict[str, list[dict[str, Any]]] = {}  # the results of each id, in reverse order
    for result in reversed(results):
        waiting.setdefault(result["tool_call_id"], []).append(result)
    pairs = []
    for call in message.get("tool_calls", ()):
        matches = waiting.get(call["id"])
        pairs.append((call, matches.pop() if matches else None))
    unused = {id(result) for matches in waiting.values() for result in matches}
    return pairs, [result for result in results if id(result) in unused]


def named_arguments(calls: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The name of each call, and its arguments as an object."""
    functions = [call["function"] for call in calls]
    return [(function["name"], _as_object(_arguments(function["arguments"]))) for function in functions]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning in the fields of all templates."""
    reasoning = message.get("reasoning_content")
    return message | dict.fromkeys(("reasoning", "thinking"), reasoning) if reasoning else message


def _with_arguments(message: dict[str, Any], form: ArgumentsForm) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    functions = [function | {"arguments": _in_form(function["arguments"], form)} for function in functions]
    return message | {
        "tool_calls": [call | {"function": function} for call, function in zip(calls, functions, strict=True)]
    }


def _in_form(text: str, form: ArgumentsForm) -> object:
    """Arguments that a model wrote, in a form."""
    if form == "text":
        return _arguments_text(text)
    value = _arguments(text)
    return _as_object(value) if form == "object" else value


def _arguments(text: str) -> object:
    return _value(_arguments_text(text))


def _as_object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"arguments": value}


def _arguments_text(text: str) -> str:
    """The JSON text of arguments that a model wrote. No arguments are an empty object, and a JSON string that has an
    object is this object."""
    value = _value(text)
    if isinstance(value, str) and isinstance(_value(value), dict):
        return value
    return "{}" if value is None or value == "" or not text.strip() else text


def _value(text: str) -> object:
    """The value of a JSON text; a text that is not JSON is its own value."""
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value
