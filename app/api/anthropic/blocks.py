"""The messages of Anthropic's API, and their conversion to the messages of a chat.

A block of a message accepts every field of the blocks that the daemon answers with, so that clients can send them back
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .. import messages as chat
from ..body import WireBody, check_depth
from ..messages import MAX_MESSAGES, MAX_PARTS, NoItems

Placed = tuple[str, chat.Message]  # the path in the body, and the message of the chat


CacheControl = dict[str, Any]


class TextBlock(WireBody, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: NoItems = None


class ThinkingBlock(WireBody, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer. The text itself goes to the model; the signature has no effect."""

    thinking: str
    signature: str = ""


class ToolUseBlock(WireBody, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None  # without effect: the model has called the tool
    toolset_name: None = None


class ToolResultBlock(WireBody, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None  # the result begins with the word Error
    cache_control: CacheControl | None = None
    toolset_name: None = None

    def message(self) -> chat.ToolMessage:
        text = text_of(self.content or "")
        return chat.ToolMessage(content=f"Error: {text}" if self.is_error else text, tool_call_id=self.tool_use_id)


UserBlocks = Annotated[list[TextBlock | ToolResultBlock], Meta(max_length=MAX_PARTS)]
AssistantBlocks = Annotated[list[TextBlock | ThinkingBlock | ToolUseBlock], Meta(max_length=MAX_PARTS)]
Texts = str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


class UserTurn(WireBody, tag_field="role", tag="user"):
    content: str | UserBlocks

    def converted(self, place: str) -> Iterator[Placed]:
        """One message for each result of a tool, and one for the texts between them."""
        if isinstance(self.content, str):
            yield place, chat.UserMessage(content=self.content)
            return
        texts: list[TextBlock] = []
        for index, block in enumerate(self.content):
            if isinstance(block, TextBlock):
                texts.append(block)
                continue
            if texts:
                yield place, chat.UserMessage(content=text_of(texts))
                texts = []
            yield f"{place}.content[{index}]", block.message()
        if texts or not self.content:
            yield place, chat.UserMessage(content=text_of(texts))


class AssistantTurn(WireBody, tag_field="role", tag="assistant"):
    content: str | AssistantBlocks

    def converted(self, place: str) -> Iterator[Placed]:
        if isinstance(self.content, str):
            yield place, chat.AssistantMessage(content=self.content)
            return
        reasoning = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        calls = [_call(block, place) for block in self.content if isinstance(block, ToolUseBlock)]
        yield place, chat.AssistantMessage(content=text, reasoning_content=reasoning or None, tool_calls=calls or None)


class SystemTurn(WireBody, tag_field="role", tag="system"):
    content: Texts

    def converted(self, place: str) -> Iterator[Placed]:
        yield place, chat.SystemMessage(content=text_of(self.content))


Turn = UserTurn | AssistantTurn | SystemTurn
Messages = Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]


def place_messages(system: Texts | None, messages: Sequence[Turn]) -> list[Placed]:
    """The messages of the chat, each with its path in the body. Raises InvalidRequest for input nested too deep."""
    placed: list[Placed] = [("system", chat.SystemMessage(content=text_of(system)))] if system else []
    for index, message in enumerate(messages):
        placed += message.converted(f"messages[{index}]")
    return placed


def text_of(content: Texts) -> str:
    """A text, or several of them, joined with newlines as in a chat."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _call(block: ToolUseBlock, place: str) -> chat.EarlierToolCall:
    check_depth(block.input, f"{place}.content.input")
    arguments = msgspec.json.encode(block.input).decode()
    return chat.EarlierToolCall(id=block.id, function=chat.CalledFunction(block.name, arguments))
