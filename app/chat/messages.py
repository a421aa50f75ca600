"""Converts the messages of a frame to the form that chat templates expect. The API has validated them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def for_template(messages: Sequence[dict[str, Any]], *, knows_developer: bool) -> list[dict[str, Any]]:
    """The messages for a chat template, as new dicts.

    Arguments of tool calls become objects. The role `developer` becomes `system` unless `knows_developer`.
    """
    return [_convert(message, knows_developer) for message in messages]


def _convert(message: dict[str, Any], knows_developer: bool) -> dict[str, Any]:
    converted = dict(message)
    if message["role"] == "developer" and not knows_developer:
        converted["role"] = "system"
    if "tool_calls" in message:
        converted["tool_calls"] = [_convert_call(call) for call in message["tool_calls"]]
    return converted


def _convert_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": _arguments(function["arguments"])}}


def _arguments(text: str) -> object:
    """Templates print arguments as JSON, so the text of a JSON object becomes that object. Other text stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
