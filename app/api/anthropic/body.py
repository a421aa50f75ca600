"""The bodies of Anthropic's API, and their conversion to the body of a chat."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, structs

from ...errors import InvalidRequest
from ..answers import Answer, Head
from ..body import WireBody
from ..conversion import Converted, Naming
from ..exchange import Asked, Protocol
from ..formats import JsonSchemaFormat, SchemaSpec
from ..inputs import Name, TargetBody
from ..messages import AssistantMessage, FunctionName, FunctionSpec, Message, NamedTool, Tool
from ..openai import ChatBody
from ..sampling import StopText, Temperature, TopK, TopP
from ..stream import Stream
from .answer import MessageAnswer
from .blocks import CacheControl, Messages, Texts, place_messages

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
_PATTERNS = (
    (re.compile(r"^tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"^tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"^response_format\.json_schema"), "output_config.format"),
    (re.compile(r"^response_format"), "output_config.format"),
    (re.compile(r"^reasoning_effort|^enable_thinking"), "thinking"),
    (re.compile(r"\.tool_call_id$"), ".tool_use_id"),
    (re.compile(r"^continue_final_message"), "messages"),
    (re.compile(r"^max_completion_tokens"), "max_tokens"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)


class ClientTool(WireBody, kw_only=True):
    """A tool that the client runs. The tools that Anthropic runs are refused by their type."""

    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # without effect: arguments are streamed as they come
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: None = None

    def converted(self) -> Tool:
        return Tool(FunctionSpec(self.name, self.description, self.input_schema, self.strict))


class _Calls(WireBody, kw_only=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_Calls, tag="auto"):
    pass


class AnyChoice(_Calls, tag="any"):
    pass


class ToolChoice(_Calls, kw_only=True, tag="tool"):
    name: ToolName


class NoChoice(WireBody, tag_field="type", tag="none"):
    pass


Choice = AutoChoice | AnyChoice | ToolChoice | NoChoice


class Enabled(WireBody, tag_field="type", tag="enabled"):
    is_on: ClassVar[bool] = True
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None
    display: Literal["summarized"] | None = None


class Adaptive(WireBody, tag_field="type", tag="adaptive"):
    is_on: ClassVar[bool] = True
    display: Literal["summarized"] | None = None


class Disabled(WireBody, tag_field="type", tag="disabled"):
    is_on: ClassVar[bool] = False


class JsonOutput(WireBody, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(WireBody):
    format: JsonOutput | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None

    def chat_format(self) -> JsonSchemaFormat | None:
        return JsonSchemaFormat(SchemaSpec(self.format.schema)) if self.format else None


class CountBody(TargetBody, kw_only=True):
    """POST /v1/messages/count_tokens, and the fields that it shares with POST /v1/messages."""

    REFUSED: ClassVar[dict[str, str]] = {"thread": "conversations are not stored: send all messages"}

    model: Name
    messages: Messages
    system: Texts | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=512)] | None = None
    tool_choice: Choice | None = None
    thinking: Enabled | Adaptive | Disabled | None = None  # None: as the chat template does without a choice
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None
    thread: None = None

    def ignored_by_template(self, names: Sequence[str]) -> list[str]:
        """The fields of this body that the chat template has no switch for. `names`: those of the frame."""
        return ["output_config.effort" if self.thinking is None else "thinking"] if names else []

    def converted(self) -> Converted:
        """The body as a chat. Raises InvalidRequest that names a field of this body."""
        placed = place_messages(self.system, self.messages)
        naming = Naming(_PATTERNS, [place for place, _ in placed])
        output = self.output_config or OutputConfig()
        is_single = isinstance(self.tool_choice, _Calls) and self.tool_choice.disable_parallel_tool_use
        thinks = self.thinking.is_on if self.thinking else None
        chat = ChatBody(
            model=self.model,
            lora=self.lora,
            load=self.load,
            messages=[message for _, message in placed],
            continue_final_message=_is_continued(*placed[-1]) or None,
            tools=[tool.converted() for tool in self.tools or ()] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=not is_single,
            response_format=output.chat_format(),
            reasoning_effort=None if thinks is False else output.effort,
            enable_thinking=thinks,
        )
        return Converted(chat, naming)


class MessagesBody(CountBody, kw_only=True):
    """POST /v1/messages."""

    REFUSED: ClassVar[dict[str, str]] = CountBody.REFUSED | {
        "service_tier": "only auto and standard_only are supported"
    }

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]  # the answer also ends where the context of the model is full
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def converted(self) -> Converted:
        base = CountBody.converted(self)
        chat = structs.replace(
            base.chat,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        return Converted(chat, base.naming)


def ask(body: MessagesBody) -> Asked:
    """A request for a message in the terms of the daemon."""
    identifier = f"msg_{uuid.uuid4().hex}"
    asked = body.converted()

    def answer(head: Head, stream: Stream) -> Answer:
        return MessageAnswer(head, body.max_tokens)

    frame = structs.replace(asked.frame(identifier), fit_max_tokens=True)
    return Asked(identifier, body, [frame], bool(body.stream), answer, asked.naming.explain, body.ignored_by_template)


MESSAGES = Protocol(MessagesBody, ask)


def _is_continued(place: str, last: Message) -> bool:
    """Whether the answer continues the last message. Raises InvalidRequest for a call without its result."""
    if not isinstance(last, AssistantMessage):
        return False
    if last.tool_calls:
        raise InvalidRequest(f"{place}: a message with tool_use needs a tool_result", param="messages")
    return True


def _choice(choice: Choice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    match choice:
        case ToolChoice(name=name):
            return NamedTool(FunctionName(name))
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
    return None
