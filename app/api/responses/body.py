"""The body of POST /v1/responses, and its conversion to the body of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest
from ...frames import Reasoning
from .. import messages as chat
from ..body import WireBody, check_depth
from ..conversion import Converted, Naming
from ..formats import Format, JsonObjectFormat, JsonSchemaFormat, SchemaSpec, TextFormat
from ..inputs import TargetBody
from ..messages import FunctionName, FunctionSpec, NamedTool, ToolName
from ..openai import ChatBody
from ..sampling import Temperature, TopLogprobs, TopP
from .items import MAX_ITEMS, Item, Placed, Raw, items_of, placed_messages
from .stored import ResponseStore

LABELS = Annotated[dict[str, str], Meta(max_length=16)]
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # Data of items that no answer has.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d{1,6}")
_PATTERNS = (
    (re.compile(r"^tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"^response_format\.json_schema"), "text.format"),
    (re.compile(r"^response_format"), "text.format"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^verbosity"), "text.verbosity"),
    (re.compile(r"^messages"), "input"),
    (re.compile(r"\.tool_call_id$"), ".call_id"),
    (re.compile(r"^max_(completion_)?tokens"), "max_output_tokens"),
)


class FunctionTool(WireBody, kw_only=True, tag_field="type", tag="function"):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Meta(max_length=1)] | None = None
    output_schema: dict[str, Any] | None = None


class WebSearchTool(msgspec.Struct, frozen=True, tag_field="type", tag="web_search"):
    """The daemon has no web search: the model does not get this tool. Codex sends it with every request."""

    web_search: ClassVar[bool] = True  # for the table of ignored fields
    external_web_access: bool | None = None


ResponseTool = FunctionTool | WebSearchTool


class FunctionChoice(WireBody, tag_field="type", tag="function"):
    name: ToolName


class AllowedTools(WireBody, tag_field="type", tag="allowed_tools"):
    """The model gets only these tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(max_length=128)]


class JsonSchema(WireBody, kw_only=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class TextOptions(WireBody):
    format: TextFormat | JsonObjectFormat | JsonSchema | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def chat_format(self) -> Format | None:
        if not isinstance(self.format, JsonSchema):
            return self.format
        spec = self.format
        return JsonSchemaFormat(SchemaSpec(spec.schema, spec.name, spec.description, spec.strict))


class ReasoningFields(WireBody):
    effort: Reasoning | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamFields(WireBody):
    include_obfuscation: bool | None = None


class InputBody(TargetBody, kw_only=True):
    """POST /v1/responses/input_tokens, and the fields that it shares with POST /v1/responses."""

    REFUSED: ClassVar[dict[str, str]] = {
        "conversation": "conversations are not stored: use previous_response_id",
        "truncation": "only disabled is supported: shorten the input",
    }

    input: str | Annotated[list[Raw], Meta(max_length=MAX_ITEMS)] = []
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    conversation: None = None

    def own_items(self) -> list[Raw]:
        """The items of `input` as JSON objects."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def resolved(self, store: ResponseStore) -> Self:
        """The body with stored items instead of references to them. Raises InvalidRequest."""
        if isinstance(self.input, str):
            return self
        references = _References(store)
        items = [references.resolved(item, f"input[{index}]") for index, item in enumerate(self.input)]
        return msgspec.structs.replace(self, input=items)

    def converted(self, store: ResponseStore) -> Converted:
        """The body, without references, as a chat. Reads the responses before it.

        Raises InvalidRequest that names a field of this body.
        """
        placed: list[Placed] = []
        if self.instructions is not None:
            placed.append(("instructions", chat.SystemMessage(content=self.instructions)))
        items = list(self._items(store))
        if len(items) > MAX_ITEMS:
            raise InvalidRequest(f"input: the conversation has more than {MAX_ITEMS} items", param="input")
        placed += placed_messages(items)
        if not placed:
            raise InvalidRequest("input is missing", param="input")
        tools, choice = self._tools()
        text = self.text or TextOptions()
        body = ChatBody(
            model=self.model,
            lora=self.lora,
            load=self.load,
            messages=[message for _, message in placed],
            tools=[_chat_tool(tool) for tool in tools] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=text.verbosity,
            response_format=text.chat_format(),
        )
        return Converted(body, Naming(_PATTERNS, [place for place, _ in placed]))

    def _items(self, store: ResponseStore) -> Iterator[tuple[str, Item]]:
        """The items of the conversation, each with its path in the body."""
        if self.previous_response_id is not None:
            name = "previous_response_id"
            for response in store.chain(self.previous_response_id, name).result():
                yield from ((name, item) for item in items_of(response.context(), name))
        for index, item in enumerate(items_of(self.own_items(), "input")):
            yield ("input" if isinstance(self.input, str) else f"input[{index}]"), item

    def _tools(self) -> tuple[list[FunctionTool], Literal["none", "auto", "required"] | NamedTool | None]:
        """The tools for the model, and the choice of the chat."""
        tools = [tool for tool in self.tools or [] if isinstance(tool, FunctionTool)]
        match self.tool_choice:
            case FunctionChoice(name=name):
                return tools, NamedTool(FunctionName(name))
            case AllowedTools(mode=mode, tools=allowed):
                unknown = {tool.name for tool in allowed} - {tool.name for tool in tools}
                if unknown:
                    raise InvalidRequest(f"tool_choice.tools: there is no tool {min(unknown)!r}", param="tool_choice")
                return [tool for tool in tools if FunctionChoice(tool.name) in allowed], mode
            case choice:
                return tools, choice


class ResponsesBody(InputBody, kw_only=True):
    """POST /v1/responses."""

    REFUSED: ClassVar[dict[str, str]] = InputBody.REFUSED | {
        "background": "answers do not run in the background: use stream",
        "prompt": "templates of prompts are not stored: use instructions",
        "moderation": "the daemon has no moderation",
    }

    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[Includable], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamFields | None = None
    is_stored: bool | None = msgspec.field(default=None, name="store")
    labels: LABELS | None = msgspec.field(default=None, name="metadata")  # a part of the response
    background: Literal[False] | None = None
    prompt: None = None
    moderation: None = None
    client_metadata: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def converted(self, store: ResponseStore) -> Converted:
        base = InputBody.converted(self, store)
        chat_body = msgspec.structs.replace(
            base.chat,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.shows_logprobs,
            top_logprobs=(self.top_logprobs or 0) if self.shows_logprobs else None,
        )
        return Converted(chat_body, base.naming)

    def ignored_by_template(self, names: Sequence[str]) -> list[str]:
        """The fields of this body that the chat template has no switch for. `names`: those of the frame."""
        fields = {"reasoning": "reasoning.effort", "verbosity": "text.verbosity"}
        return [fields[name] for name in names]


def _chat_tool(tool: FunctionTool) -> chat.Tool:
    return chat.Tool(FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict))


class _References:
    """Replaces references to stored items. The id of an item has the id of its response and its place there."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._outputs: dict[str, dict[str, Raw]] = {}  # id of a response -> its items that nothing refers to

    def resolved(self, item: Raw, place: str) -> Raw:
        """The item, or the stored item that it refers to. Raises PreviousNotFound, or InvalidRequest."""
        check_depth(item, place)
        if item.get("type") != "item_reference":
            return item
        name = str(item.get("id"))
        match = _ITEM_ID.fullmatch(name)
        response = f"resp_{match[1]}" if match else name
        if response not in self._outputs:
            stored = self._store.get(response, place).result()
            self._outputs[response] = {entry["id"]: entry for entry in msgspec.json.decode(stored.reply)["output"]}
        output = self._outputs[response].pop(name, None)
        if output is None:
            raise InvalidRequest(f"{place}: there is no such item, or the input has it twice", param=place)
        return output
