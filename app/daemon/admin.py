"""What our own client and the daemon say to each other beside OpenAI's routes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...engine.quantization import Quant
from .body import WireBody


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
    quant: str = ""  # the weights' format where they are quantised
    context: int = 0
    memory: int = 0  # bytes: weights and KV cache
    token_bytes: int = 0  # of weights that one token reads; 0: unknown
    cache_tokens: int = 0
    cache_used: int = 0
    requests: int = 0
    idle: float = 0.0  # seconds since the last request ended
    unload_in: float | None = None  # seconds; None: never, or busy
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    options: tuple[str, ...] = ()  # of the call that loaded it, where they differ from the settings: "--quant int8"


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/status."""

    version: str
    pid: int
    url: str  # of the TCP endpoint
    stopping: bool = False
    settings: dict[str, Any] = {}  # as config.loading: how models are loaded


class LoadBody(WireBody):
    """POST /admin/load, answered by server-sent events: LoadProgress…, then a LoadedModel or an error."""

    model: str
    backend: str | None = None
    quant: Quant | None = None


class LoadProgress(msgspec.Struct, frozen=True):
    stage: str
    done: float  # 0…1


class UnloadBody(WireBody):
    """POST /admin/unload."""

    model: str
