"""How the terminal UI and the commands speak to the daemon. Nothing else of ours does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import msgspec

from .config import Settings


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model that could be used now: bundled, or in the Hugging Face cache."""

    id: str
    bundled: bool = False
    loaded: bool = False
    size: int = 0  # bytes on disk
    context: int = 0  # of the model; 0: unknown
    description: str = ""


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with an engine process."""

    id: str
    state: Literal["loading", "ready"]
    pid: int
    backend: str = ""
    device: str = ""
    dtype: str = ""
    context: int = 0
    memory: int = 0  # bytes: weights and KV cache
    cache_tokens: int = 0
    cache_used: int = 0
    requests: int = 0
    idle: float = 0.0  # seconds since the last request ended
    unload_in: float | None = None  # seconds; None: never, or busy


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A whole call, given once its arguments are complete."""

    id: str
    name: str
    arguments: str


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of an answer."""

    finish: str  # stop, length, tool_calls
    usage: Usage
    ttft: float  # seconds from asking to the first piece
    seconds: float  # from asking to the end

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first over the time after the first."""
        return (self.usage.completion_tokens - 1) / max(self.seconds - self.ttft, 1e-9)


ChatEvent = TextPiece | ReasoningPiece | ToolCall | Done


class Client:
    """A connection to the daemon over its unix socket. Use `async with await Client.connect(settings)`.

    Every method raises an AppError of app/errors.py; the daemon's own come back as the same class.
    """

    @classmethod
    async def connect(
        cls, settings: Settings, *, start: bool = True, on_status: Callable[[str], None] | None = None
    ) -> Client:
        """Reach the daemon, starting it when `start` and none runs. Raises DaemonUnreachable."""
        raise NotImplementedError

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        raise NotImplementedError

    async def models(self) -> list[ModelEntry]:
        raise NotImplementedError

    async def loaded(self) -> list[LoadedModel]:
        raise NotImplementedError

    async def load(
        self, model: str, *, backend: str | None = None, on_progress: Callable[[str, float], None] | None = None
    ) -> LoadedModel:
        """Load a model (a no-op when it is); progress comes as (words, 0…1)."""
        raise NotImplementedError

    def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncGenerator[ChatEvent, None]:
        """One answer as events; parameters are the OpenAI body's. Closing the iterator cancels the request."""
        raise NotImplementedError

    def complete(self, model: str, prompt: str, **parameters: Any) -> AsyncGenerator[ChatEvent, None]:
        raise NotImplementedError

    async def count_tokens(self, model: str, messages: list[dict[str, Any]]) -> int:
        raise NotImplementedError

    async def unload(self, model: str) -> None:
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Ask the daemon to drain and end; returns when it is gone."""
        raise NotImplementedError
