"""Messages and tools: the types that clients send, and their conversion for chat templates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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


class MadeToolCall(WireBody):
    """A tool call in an earlier message of the assistant."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # ignored: some clients copy it from streamed deltas


class AssistantMessage(WireBody, tag_field="role", tag="assistant"):
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    tool_calls: list[MadeToolCall] | None = None
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


def message_dict(message: Message) -> dict[str, Any]:
    """A message for chat templates: without fields that are None, but always with `content`."""
    plain = {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
    plain.setdefault("content", None)
    if isinstance(message, AssistantMessage):
        reasoning = plain.pop("reasoning", None)
        if reasoning is not None:
            plain.setdefault("reasoning_content", reasoning)
        plain.pop("annotations", None)
        if message.tool_calls is not None:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
                for call in message.tool_calls
            ]
    return plain


def tool_dict(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": "function", "function": function}
