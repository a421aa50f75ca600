"""The memory of a loaded model on one device. A backend computes the plan before it loads the model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages of the KV cache in the layers with a sliding window, which keep only what their window still reads."""

    page_bytes: int  # of a page in all these layers
    row_pages: int  # pages for the window of one sequence
    step_pages: int  # pages for the tokens of one step, besides the windows

    def count(self, pages: int, rows: int) -> int:
        """The number of pages for `rows` sequences that have `pages` pages in the layers without a window."""
        return min(pages, rows * self.row_pages + self.step_pages)

    def bytes(self, pages: int, rows: int) -> int:
        """The bytes of these pages."""
        return self.count(pages, rows) * self.page_bytes


NO_WINDOW = WindowPages(0, 0, 0)


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
    page_bytes: int  # of a page in the layers that keep all positions
    num_pages: int  # of a load with the options of this plan
    max_pages: int  # the KV cache's share of the free memory, or the size in the options
    context: int  # requested positions of one sequence; the maximum of the model if the options have none
    max_positions: int  # maximum context of the model
    workspace: int = 0  # estimated before the load, and measured after it if the memory is small; 0: unknown
    adapter_slots: int = 0  # number of adapter slots that `adapters` has, besides the slot of the base model
    window: WindowPages = NO_WINDOW
    window_pages: int = 0  # as num_pages, in the layers with a window
    max_window_pages: int = 0  # as max_pages, in the layers with a window
    state_bytes: int = 0  # of the recurrent states of one sequence; the cache has a state and a snapshot for each
    num_states: int = 0  # of a load with the options of this plan
    num_snapshots: int = 0  # of a load with the options of this plan

    @property
    def weights_fit(self) -> bool:
        return self.weights + self.workspace <= self.free

    @property
    def max_cache(self) -> int:
        """Maximum bytes of the KV cache. A setting may give the cache more memory than is free."""
        limit = self.max_pages * self.page_bytes + self.max_window_pages * self.window.page_bytes + 2 * self.state_bytes
        return min(limit, max(0, self.free - self.weights - self.workspace))

    @property
    def planned_cache(self) -> int:
        """Bytes of the KV cache of a load with the options of this plan."""
        states = (self.num_states + self.num_snapshots) * self.state_bytes
        return self.num_pages * self.page_bytes + self.window_pages * self.window.page_bytes + states

    @property
    def remaining(self) -> int:
        """Bytes that weights, adapters and the largest KV cache leave, for intermediate results and captured graphs."""
        return max(0, self.free - self.weights - self.adapters - self.max_cache)

    def cache_bytes(self, context: int, parallel: int = 1) -> int:
        """Bytes of KV cache for `parallel` sequences of `context` positions."""
        return self._bytes(-(-context // self.page_size), parallel)

    def window_savings(self, context: int, parallel: int = 1) -> int:
        """Bytes of KV cache that the layers with a window do not need, because they keep only their window."""
        pages = parallel * -(-context // self.page_size)
        return pages * self.window.page_bytes - self.window.bytes(pages, parallel)

    def _bytes(self, pages: int, parallel: int) -> int:
        """Bytes of KV cache for `parallel` sequences of `pages` pages each."""
        count = parallel * pages
        return count * self.page_bytes + self.window.bytes(count, parallel) + 2 * parallel * self.state_bytes

    def fits(self, context: int, parallel: int = 1) -> bool:
        """Whether the weights and the KV cache of `parallel` sequences of `context` positions fit."""
        is_possible = self.weights_fit and context <= self.max_positions
        return is_possible and self.cache_bytes(context, parallel) <= self.max_cache

    def largest_context(self, parallel: int = 1) -> int:
        """The largest context that fits `parallel` times; 0: none."""
        if not self.weights_fit:
            return 0
        pages = range(1, -(-self.max_positions // self.page_size) + 1)
        count = bisect_right(pages, self.max_cache, key=lambda number: self._bytes(number, parallel))
        return min(self.max_positions, count * self.page_size)

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
