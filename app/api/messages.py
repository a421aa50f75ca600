"""Messages and tools: the types that clients send, and their conversion for frames.

The types are the only validation of messages: the worker relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest
from .body import WireBody

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


class TextPart(WireBody, tag_field="type", tag="text"):
    text: str


Content = str | list[TextPart]


class SystemMessage(WireBody, tag_field="role", tag="system"):
    content: Content
    name: str | None = None


class DeveloperMessage(WireBody, tag_field="role", tag="developer"):
    content: Content
    name: str | None = None


class UserMessage(WireBody, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class CalledFunction(WireBody):
    name: str
    arguments: str


class EarlierToolCall(WireBody):
    """A tool call in an earlier message of the assistant."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # ignored: some clients copy it from streamed deltas


class AssistantMessage(WireBody, tag_field="role", tag="assistant"):
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    tool_calls: list[EarlierToolCall] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolMessage(WireBody, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionSpec(WireBody):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # enforce the schema; calls that tool_choice forces always follow it


class Tool(WireBody):
    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(WireBody):
    name: ToolName


class NamedTool(WireBody):
    function: FunctionName
    type: Literal["function"] = "function"


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as frames have them: `content` is a text, and fields without a value are omitted.

    Text parts are joined with newlines. Raises InvalidRequest for a message with neither content nor tool calls.
    """
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as frames have it: fields without a value are omitted."""
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": "function", "function": function}


def _plain_message(message: Message, where: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": type(message).__struct_config__.tag, "content": _text(message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None and not message.tool_calls:
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            plain["reasoning_content"] = reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: EarlierToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)
