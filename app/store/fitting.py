"""The result of `localllm fit`: the memory that a model needs on a backend.

The class converts to JSON with dataclasses.asdict, and back with msgspec.convert.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory of a model on one backend. All sizes are in bytes."""

    backend: str
    device: str
    fits: bool
    reason: str  # why the model does not fit, or cannot run; empty if it fits
    context: int  # positions of one sequence
    parallel: int  # sequences at the same time
    largest_context: int  # the largest context that fits `parallel` times; 0: none
    free: int = 0
    weights: int = 0
    adapters: int = 0  # all adapter slots
    cache: int = 0  # KV cache of `parallel` sequences of `context` positions
    max_cache: int = 0  # KV cache that a load may use at most
    remaining: int = 0  # what weights, adapters and the largest KV cache leave: for intermediate results, graphs
    tokens_per_second: float | None = None  # of one sequence at an empty context, estimated; None: unknown
    notes: tuple[str, ...] = ()  # for the user: settings of all models that a load on this backend would not have
    runs: bool = True  # False: the backend is unavailable or cannot run this model, whatever its size

    def for_json(self) -> dict[str, Any]:
        return asdict(self)
