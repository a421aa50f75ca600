"""The types of the Responses API: a response, its output items, the events of its stream, and lists of items."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ..replies import TokenLogprob

Status = Literal["completed", "failed", "in_progress", "cancelled", "incomplete"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | None = None


OutputItem = OutputMessage | FunctionCallItem | Reasoning
ContentPart = OutputText | ReasoningText


class InputDetails(msgspec.Struct):
    """Tokens of the prompt whose keys and values came from the prefix cache, and those that entered it."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningChoice(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, kw_only=True):
    """The answer to POST /v1/responses. The fields after `usage` are those of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    model: str
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    background: bool = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningChoice
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    warnings: list[str] | UnsetType = UNSET  # not in OpenAI's API


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0


class Created(_Event, tag="response.created"):
    response: Response


class InProgress(_Event, tag="response.in_progress"):
    response: Response


class Completed(_Event, tag="response.completed"):
    response: Response


class Incomplete(_Event, tag="response.incomplete"):
    """The end of a response that reached its limit of tokens, or was cancelled."""

    response: Response


class Failed(_Event, tag="response.failed"):
    response: Response


class ItemAdded(_Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(_Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _InItem(_Event, kw_only=True):
    item_id: str
    output_index: int


class _InContent(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_InContent, kw_only=True, tag="response.content_part.added"):
    part: ContentPart


class PartDone(_InContent, kw_only=True, tag="response.content_part.done"):
    part: ContentPart


class OutputTextDelta(_InContent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_InContent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_InContent, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InContent, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


Event = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)


class InputTokens(msgspec.Struct):
    """The reply to POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Deleted(msgspec.Struct):
    """The reply to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """The reply to GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
