"""Checks the messages of clients and converts them to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidRequest, UnsupportedParameter

ROLES = ("system", "developer", "user", "assistant", "tool")


def for_template(messages: Sequence[object], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Messages with text as content, objects as tool-call arguments, and roles that the template supports.

    Joins text parts with newlines; a missing content becomes "". The role `developer` becomes `system` unless
    `knows_developer`. Raises InvalidRequest or UnsupportedParameter, with the path of the first wrong value.
    """
    if not messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    shaped = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} must be an object", param=where)
        shaped.append(_shape(message, where, knows_developer))
    return shaped


def _shape(message: dict[str, Any], where: str, knows_developer: bool) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}", param=f"{where}.role")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise InvalidRequest(
            f"{where}.tool_calls: only an assistant message may have tool calls", param=f"{where}.tool_calls"
        )
    if message.get("content") is None and not (role == "assistant" and calls):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    shaped: dict[str, Any] = {
        "role": "system" if role == "developer" and not knows_developer else role,
        "content": _text(message.get("content"), f"{where}.content"),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            shaped[name] = message[name]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        shaped["reasoning_content"] = reasoning
    if calls:
        shaped["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return shaped


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{place} must be an object", param=place)
        if part.get("type") != "text":
            raise UnsupportedParameter(
                f"{place}.type {part.get('type')!r} is not supported: this model supports only text parts",
                param=f"{place}.type",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place}.text must be a string", param=f"{place}.text")
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    shaped = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            place = f"{where}[{index}].function"
            raise InvalidRequest(f"{place} must have a name and arguments", param=place)
        arguments = function.get("arguments", {})
        shaped.append(
            {
                **({"id": call["id"]} if isinstance(call.get("id"), str) else {}),
                "type": "function",
                "function": {"name": function["name"], "arguments": _arguments(arguments)},
            }
        )
    return shaped


def _arguments(arguments: object) -> object:
    """Templates print arguments as JSON, so the text of a JSON object becomes that object. Other text stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
