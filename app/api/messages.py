"""Messages and tools: the types that clients send, and their conversion for frames.

These types are the only validation of messages. The worker relies on it.

A message accepts every field of the messages that clients keep: those of this API's answers, and those that client
libraries add to them. A comment marks the fields that are copies of others; ignored.py lists those without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest
from .body import WireBody, without_none

# A message costs at least one token of the prompt, in most chat templates at least four.
MAX_MESSAGES = 16_384
MAX_PARTS = 2048  # text parts of a message
MAX_CALLS = 128  # tool calls of a message; OpenAI's limit

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]


NoItems = Annotated[list[Any], Meta(max_length=0)] | None


class TextPart(WireBody, tag_field="type", tag="text"):
    text: str
    annotations: NoItems = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(WireBody, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class _Message(WireBody, kw_only=True, tag_field="role"):
    """The fields of all messages."""

    content: Content
    name: str | None = None
    cache_control: dict[str, Any] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as a dict for a frame. `where`: the JSON path of the message, for errors."""
        return without_none({"role": self.__struct_config__.tag, "content": _text(self.content), "name": self.name})


class SystemMessage(_Message, tag="system"):
    pass


class DeveloperMessage(_Message, tag="developer"):
    pass


class UserMessage(_Message, tag="user"):
    pass


class ToolMessage(_Message, tag="tool"):
    tool_call_id: str

    def plain(self, where: str) -> dict[str, Any]:
        return super().plain(where) | {"tool_call_id": self.tool_call_id}


class CalledFunction(WireBody):
    name: str
    arguments: str
    # Without effect: copies of `arguments`, and data that client libraries add.
    parsed_arguments: Any = None
    provider_specific_fields: dict[str, Any] | None = None


class EarlierToolCall(WireBody):
    """A tool call in an earlier message of the assistant."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    # Without effect: some clients copy `index` from streamed deltas; client libraries add the others.
    index: int | None = None
    provider_specific_fields: dict[str, Any] | None = None
    extra_content: dict[str, Any] | None = None

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


class AssistantMessage(_Message, tag="assistant"):
    # optional if there are tool calls
    content: str | Annotated[list[TextPart | RefusalPart], Meta(max_length=MAX_PARTS)] | None = None  # type: ignore[assignment]
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    tool_calls: Annotated[list[EarlierToolCall], Meta(max_length=MAX_CALLS)] | None = None
    refusal: str | None = None  # the content of a message that has no other
    audio: None = None
    function_call: None = None
    annotations: NoItems = None
    images: NoItems = None
    # Without effect: a copy of `content`, and data that client libraries add.
    parsed: Any = None
    provider_specific_fields: dict[str, Any] | None = None
    # Other forms of the reasoning, for a message without `reasoning` and `reasoning_content`.
    reasoning_details: list[Any] | None = None
    reasoning_items: list[Any] | None = None
    thinking_blocks: list[Any] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        if self.content is None and not self.tool_calls and not self.refusal:
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        calls = [call.plain() for call in self.tool_calls or ()]
        more = {
            "content": None if self.content else self.refusal,
            "reasoning_content": self.reasoning_content or self.reasoning or self._other_reasoning() or None,
            "tool_calls": calls or None,
        }
        return super().plain(where) | without_none(more)

    def _other_reasoning(self) -> str:
        """The text of the reasoning in the forms of OpenRouter, of Anthropic, or of OpenAI's reasoning items. Encrypted
        reasoning has none."""
        forms = (self.reasoning_details, self.thinking_blocks, self.reasoning_items)
        return next(filter(None, map(_thoughts, forms)), "")


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class FunctionSpec(WireBody):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow the schema; a call that tool_choice forces always follows it


class Tool(WireBody):
    function: FunctionSpec
    type: Literal["function"] = "function"
    cache_control: dict[str, Any] | None = None


class FunctionName(WireBody):
    name: ToolName


class NamedTool(WireBody):
    function: FunctionName
    type: Literal["function"] = "function"


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as dicts for a frame: `content` is a text, and fields without a value are omitted.

    Text parts are joined with newlines. Raises InvalidRequest for a message with neither content nor tool calls, and
    for a tool message that is not the result of a call (_check_results).
    """
    _check_results(messages)
    return [message.plain(f"messages[{index}]") for index, message in enumerate(messages)]


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as a dict for a frame: fields without a value are omitted."""
    return {"type": "function", "function": without_none(msgspec.to_builtins(tool.function))}


def _check_results(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest for a tool message that does not answer one call of the assistant message before it. As in
    OpenAI's API, only other tool messages may be between the two.

    A chat template shows results in their order, without their ids: the model would take a foreign result for its own.
    """
    calls: list[str] = []  # ids of the calls of the last message that is not a tool message
    pending: list[str] = []  # those without a result; two calls may have one id
    for index, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in pending:
                raise _wrong_result(message.tool_call_id, f"messages[{index}].tool_call_id", calls)
            pending.remove(message.tool_call_id)
        else:
            earlier = message.tool_calls if isinstance(message, AssistantMessage) else None
            calls = [call.id for call in earlier or ()]
            pending = list(calls)


def _wrong_result(identifier: str, where: str, calls: Sequence[str]) -> InvalidRequest:
    """The error for a tool message at `where` that answers none of `calls`, or answers a call again."""
    problem = "the assistant message before it has no tool call with this id"
    if identifier in calls:
        problem = "a message before it has the result of this call"
    return InvalidRequest(f"{where}: {problem}: {identifier[:100]!r}", param=where)


def _thoughts(items: list[Any] | None) -> str:
    """The texts of reasoning in a list of objects, which may have summaries instead of texts."""
    texts: list[str] = []
    for item in items or ():
        if isinstance(item, dict):
            texts += [text for name in ("text", "thinking", "summary") if isinstance(text := item.get(name), str)]
            texts += [_thoughts(part) for name in ("summary", "content") if isinstance(part := item.get(name), list)]
    return "\n".join(filter(None, texts))


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
