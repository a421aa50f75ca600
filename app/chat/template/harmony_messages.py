"""Converts messages to the form that the chat template of gpt-oss expects."""

from __future__ import annotations

from typing import Any


def harmony_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text beside calls is the end of its reasoning.

    The template shows both in the channel `analysis`, and refuses a message with calls that has both fields.
    """
    if not message.get("tool_calls"):
        return message
    thoughts = [text for text in (message.get("reasoning_content"), message["content"]) if text]
    return message | {"content": "", "reasoning_content": "\n\n".join(thoughts)}
