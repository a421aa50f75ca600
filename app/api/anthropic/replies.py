"""The types of Anthropic's replies: a message, the events of its stream, and errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...errors import AppError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class Thinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | msgspec.Raw


Block = Text | Thinking | ToolUse


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens. Those of the prompt are `input_tokens` and `cache_read_input_tokens`: their keys and values came from the
    prefix cache. All prompts enter the cache, so none are counted as created."""

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class MessageReply(msgspec.Struct, kw_only=True):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    warnings: list[str] | UnsetType = UNSET  # not in Anthropic's API


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageReply


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class TokenCount(msgspec.Struct):
    """The reply to POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    message: str
    code: str  # this and the fields below are not in Anthropic's API
    param: str | None = None
    hint: str = ""
    details: dict[str, str] | None = None


class MessageError(msgspec.Struct, tag_field="type", tag="error"):
    error: MessageErrorDetail


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | MessageError
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# The parameter of an error -> details that Anthropic's client acts on: its tool runner sends all messages then.
_DETAILS = {"thread": {"error_code": "thread_unsupported_request"}}


def error_of(error: AppError) -> MessageError:
    """An error in Anthropic's form."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail = MessageErrorDetail(
        type=kind,
        message=error.message,
        code=error.code,
        param=error.param,
        hint=error.hint,
        details=_DETAILS.get(error.param or ""),
    )
    return MessageError(detail)


def error_body(error: AppError) -> bytes:
    """The JSON of an error in Anthropic's form."""
    return msgspec.json.encode(error_of(error))
