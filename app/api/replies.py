"""The types of replies to clients: OpenAI's answers, the events of its streams, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ..errors import AppError, OutOfMemory, Overloaded, Stopping, Unauthorized, WorkerDied
from .anthropic.replies import error_body as message_error
from .ollama.errors import error_body as ollama_error

RETRY_AFTER_SECONDS = "1"


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class UsageReport(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()
    # Not in OpenAI's API: seconds from the first piece of the worker to the last one, even if the client reads later.
    decode_seconds: float = 0.0


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    warnings: list[str] | UnsetType = UNSET  # not in OpenAI's API
    choices: list[ChunkChoice]
    usage: UsageReport | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReport(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReport] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of a chat that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    warnings: list[str] | UnsetType = UNSET  # not in OpenAI's API
    choices: list[ChatChoice]
    usage: UsageReport


class TextLogprobs(msgspec.Struct):
    """The log-probabilities of /v1/completions: lists of equal length; text_offset is in characters of the answer."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(msgspec.Struct, kw_only=True):
    """The answer of a completion, or one event of a streamed completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    warnings: list[str] | UnsetType = UNSET  # not in OpenAI's API
    choices: list[TextChoice]
    usage: UsageReport | UnsetType | None = UNSET


class EmbeddingEntry(msgspec.Struct):
    """One vector: numbers, or the base64 of float32 numbers in little-endian order."""

    object: str = "embedding"
    index: int = 0
    embedding: list[float] | str = ""


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The reply to POST /v1/embeddings, in the order of the inputs."""

    object: str = "list"
    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    warnings: list[str] | UnsetType = UNSET  # not in OpenAI's API


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """An error. Some errors have more fields: a hint, and numbers such as n_ctx."""

    error: ErrorDetail


def error_body(error: AppError) -> bytes:
    """An error as JSON in OpenAI's format, with its hint and numbers as additional fields."""
    detail: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.hint:
        detail["hint"] = error.hint
    return msgspec.json.encode({"error": detail | error.numbers})


# The errors below a path have the form of its protocol. All others have OpenAI's.
ERROR_BODIES: dict[str, Callable[[AppError], bytes]] = {
    "/v1/messages": message_error,
    "/messages": message_error,
    "/api": ollama_error,
}


def error_response(error: AppError, path: str, headers: dict[str, str] | None = None) -> Response:
    """An error as a response with status and headers; the headers tell the client if it should try again.

    `path`: of the request; it selects the form of the error.
    """
    fields = dict(headers or {})
    if isinstance(error, Overloaded | OutOfMemory | Stopping):
        fields["retry-after"] = RETRY_AFTER_SECONDS
    elif error.status >= 500 and not isinstance(error, WorkerDied):
        fields["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        fields["www-authenticate"] = "Bearer"
    if error.status == 413:
        fields["connection"] = "close"  # the rest of the request body is not read
    body = next((form for start, form in ERROR_BODIES.items() if f"{path}/".startswith(f"{start}/")), error_body)
    return Response(body(error), error.status, fields, "application/json")
