"""The input items of responses, and their conversion to the messages of a chat.

An item accepts every field of the items that the daemon answers with, so that clients can send them back unchanged.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from ...errors import UnsupportedParameter
from .. import messages as chat
from ..body import WireBody, convert
from ..messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS

Status = Literal["in_progress", "completed", "incomplete"]
Raw = dict[str, Any]
Placed = tuple[str, chat.Message]  # the path in the body, and the message of the chat
_SEALED = "localllm:"  # the start of reasoning in `encrypted_content`, which is not secret here


class InputText(WireBody, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Raw | None = None


class OutputText(WireBody, tag_field="type", tag="output_text"):
    text: str
    # Without effect: data beside the text.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class Refusal(WireBody, tag_field="type", tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[list[InputText | OutputText | Refusal], Meta(max_length=MAX_PARTS)]


class _Item(WireBody, kw_only=True, tag_field="type"):
    """`id` and `status` have no effect: the place of an item in the list counts."""

    id: str | None = None
    status: Status | None = None


class MessageItem(_Item, kw_only=True, tag="message"):
    role: Literal["user", "system", "developer", "assistant"]
    content: str | Parts
    phase: Literal["commentary", "final_answer"] | None = None  # without effect: the order of the messages counts


class CallItem(_Item, kw_only=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    # Without effect: the model has called the function; a copy of the arguments.
    caller: Raw | None = None
    parsed_arguments: Any = None


class OutputItem(_Item, kw_only=True, tag="function_call_output"):
    call_id: str
    output: str | Annotated[list[InputText], Meta(max_length=MAX_PARTS)]
    caller: Raw | None = None  # without effect, as above


class SummaryText(WireBody, tag_field="type", tag="summary_text"):
    text: str


class ReasoningText(WireBody, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    summary: Annotated[list[SummaryText], Meta(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    def text(self, place: str) -> str:
        """The reasoning. Raises UnsupportedParameter for reasoning that another server has encrypted."""
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content:
            return opened(self.encrypted_content, f"{place}.encrypted_content")
        return "\n".join(part.text for part in self.summary)


Item = MessageItem | CallItem | OutputItem | ReasoningItem
MAX_ITEMS = MAX_MESSAGES


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that keep nothing else of it."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def opened(text: str, place: str) -> str:
    """The reasoning in `encrypted_content`. Raises UnsupportedParameter for the text of another server."""
    try:
        if not text.startswith(_SEALED):
            raise binascii.Error
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise UnsupportedParameter(
            f"{place}: another server has encrypted this reasoning", hint="leave the item out", param=place
        ) from None


def items_of(raw: Sequence[Raw], where: str) -> list[Item]:
    """The items in a list of JSON objects. A message may omit its type. Raises InvalidRequest with the JSON path."""
    typed = [item if "type" in item else {"type": "message", **item} for item in raw]
    return convert(typed, list[Item], where, MessageItem)


def placed_messages(items: Iterable[tuple[str, Item]]) -> list[Placed]:
    """The messages of the chat, each with the path of its first item. Raises UnsupportedParameter.

    Items of the assistant that follow each other are one message: reasoning, a text, and calls.
    """
    placed: list[Placed] = []
    turn: _Turn | None = None
    for place, item in items:
        if isinstance(item, OutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            if turn is not None:
                placed.append(turn.message())
                turn = None
            placed.append((place, _message(item)))
            continue
        if turn is not None and turn.ends_before(item):
            placed.append(turn.message())
            turn = None
        turn = turn or _Turn(place)
        turn.add(item, place)
    if turn is not None:
        placed.append(turn.message())
    return placed


class _Turn:
    """A message of the assistant."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[chat.EarlierToolCall] = []

    def ends_before(self, item: Item) -> bool:
        """Whether an item belongs to the next message. A text after a call belongs to the message of the call."""
        match item:
            case MessageItem():
                return bool(self._texts) and not self._calls
            case ReasoningItem():
                return bool(self._texts or self._calls)
        return len(self._calls) == MAX_CALLS

    def add(self, item: Item, place: str) -> None:
        match item:
            case ReasoningItem():
                self._reasoning.append(item.text(place))
            case MessageItem():
                self._texts.append(_text(item.content))
            case CallItem():
                function = chat.CalledFunction(item.name, item.arguments)
                self._calls.append(chat.EarlierToolCall(id=item.call_id, function=function))

    def message(self) -> Placed:
        message = chat.AssistantMessage(
            content="".join(self._texts),
            reasoning_content="\n".join(self._reasoning) or None,
            tool_calls=self._calls or None,
        )
        return self._place, message


_ROLES: dict[str, type[chat.UserMessage | chat.SystemMessage | chat.DeveloperMessage]] = {
    "user": chat.UserMessage,
    "system": chat.SystemMessage,
    "developer": chat.DeveloperMessage,
}


def _message(item: MessageItem | OutputItem) -> chat.Message:
    if isinstance(item, OutputItem):
        return chat.ToolMessage(content=_text(item.output), tool_call_id=item.call_id)
    return _ROLES[item.role](content=_text(item.content))


def _text(content: str | Sequence[InputText | OutputText | Refusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
