"""The memory of a loaded model on one device. A backend computes the plan before it loads the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Weights, KV cache, adapter slots and workspace in bytes. Steps need the workspace for intermediate results,
    libraries and captured graphs.

    | free                                                                                  |
    | weights | cache (num_pages, at most max_pages) | adapters | remaining, with workspace |

    Adapter slots get only what the weights, the workspace and `num_pages` pages leave. They take it with the first
    adapter.
    """

    free: int  # before the load
    weights: int  # expected
    token_bytes: int  # bytes of weights that are read to compute one token; 0: unknown
    adapters: int  # all adapter slots
    page_size: int  # positions in a page of the KV cache
    page_bytes: int
    num_pages: int  # of a load with the options of this plan
    max_pages: int  # the KV cache's share of the free memory, or the size in the options
    context: int  # requested positions of one sequence; the maximum of the model if the options have none
    max_positions: int  # maximum context of the model
    workspace: int = 0  # estimated before the load, and measured after it if the memory is small; 0: unknown
    adapter_slots: int = 0  # number of adapter slots that `adapters` has, besides the slot of the base model

    @property
    def weights_fit(self) -> bool:
        return self.weights + self.workspace <= self.free

    @property
    def max_cache(self) -> int:
        """Maximum bytes of the KV cache. A setting may give the cache more memory than is free."""
        return min(self.max_pages * self.page_bytes, max(0, self.free - self.weights - self.workspace))

    @property
    def remaining(self) -> int:
        """Bytes that weights, adapters and the largest KV cache leave, for intermediate results and captured graphs."""
        return max(0, self.free - self.weights - self.adapters - self.max_cache)

    def cache_bytes(self, context: int, parallel: int = 1) -> int:
        """Bytes of KV cache for `parallel` sequences of `context` positions."""
        return parallel * -(-context // self.page_size) * self.page_bytes

    def fits(self, context: int, parallel: int = 1) -> bool:
        """Whether the weights and the KV cache of `parallel` sequences of `context` positions fit."""
        is_possible = self.weights_fit and context <= self.max_positions
        return is_possible and self.cache_bytes(context, parallel) <= self.max_cache

    def largest_context(self, parallel: int = 1) -> int:
        """The largest context that fits `parallel` times; 0: none."""
        if not self.weights_fit:
            return 0
        return min(self.max_positions, self.max_cache // self.page_bytes // parallel * self.page_size)

    def numbers(self) -> dict[str, int]:
        """The fields of the error body of a refused load."""
        return {
            "free_bytes": self.free,
            "weight_bytes": self.weights,
            "workspace_bytes": self.workspace,
            "adapter_bytes": self.adapters,
            "cache_bytes": self.cache_bytes(self.context),
            "max_cache_bytes": self.max_cache,
            "max_context": self.largest_context(),
        }
