"""Converts messages and tools to the form that the chat template of gpt-oss expects.

The template renders one tool call per message, labels a tool result with the name of the call before it, and renders a
system message only at the beginning. Without this conversion, it would drop the rest without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import TemplateFailed
from .messages import take_result

_INSTRUCTIONS = ("system", "developer")


def harmony_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one message of instructions, one tool call per message, and each result after its call.

    The reasoning of a message with a tool call is in its field `thinking`. Raises TemplateFailed for instructions after
    another message.
    """
    count = next(
        (index for index, message in enumerate(messages) if message["role"] not in _INSTRUCTIONS), len(messages)
    )
    converted = _merged_instructions(messages[:count])
    pending = list(messages[count:])
    while pending:
        message = pending.pop(0)
        if message["role"] in _INSTRUCTIONS:
            where = f"messages[{len(messages) - len(pending) - 1}].role"
            raise TemplateFailed(
                f"{where}: the chat template of this model supports the role {message['role']} only at the beginning",
                param=where,
            )
        if message.get("tool_calls"):
            converted += _split_calls(message, pending)
        else:
            converted.append(_with_thinking(message))
    return converted


def harmony_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools, each with a description, which the template requires."""
    if tools is None:
        return None
    return [tool | {"function": {"description": ""} | tool["function"]} for tool in tools]


def _merged_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(messages) < 2:
        return list(messages)
    texts = [message["content"] for message in messages if message["content"]]
    return [{"role": "developer", "content": "\n\n".join(texts)}]


def _split_calls(message: dict[str, Any], pending: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each call, followed by the result of the call, which is removed from `pending`."""
    results = []
    while pending and pending[0]["role"] == "tool":
        results.append(pending.pop(0))
    first, *others = message["tool_calls"]
    texts = [text for text in (message.get("reasoning_content"), message["content"]) if text]
    # The template renders the reasoning and the text as one message, and refuses a message that has both fields.
    start = {"role": "assistant", "content": "", "thinking": "\n\n".join(texts), "tool_calls": [first]}
    split = [start, *take_result(first, results)]
    for call in others:
        split.append({"role": "assistant", "content": "", "tool_calls": [call]})
        split += take_result(call, results)
    return split + results


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return message | {"thinking": reasoning} if reasoning else message
