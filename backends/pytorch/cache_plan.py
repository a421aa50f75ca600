"""Computes the pages of the KV cache: a group of pages for the layers that keep all positions, and one for the layers
with a sliding window, which keep the positions that their window still reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.files.model_config import ModelConfig
from ...engine.memory_plan import NO_WINDOW, MemoryPlan, WindowPages
from ...engine.options import LoadOptions
from ...engine.runner import CacheGroup, page_bytes
from .device import Device

# If memory is short, the cache has room for the windows of at most as many rows as have this number of windows of
# positions each in the layers without a window: longer rows need more pages there, and not more windows.
ROW_WINDOWS = 4
SCALE_BYTES = 4  # of a head of a token in an int8 KV cache


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The number of pages in the layers that keep all positions, and the number of rows whose windows fit. If memory is
    short, these are fewer than the maximum rows, so that one sequence of the requested context fits."""

    pages: int
    rows: int
    max_pages: int  # as MemoryPlan.max_pages
    max_window_pages: int  # as MemoryPlan.max_window_pages


@dataclass(frozen=True, slots=True)
class CachePages:
    """The bytes of the pages of all layers. `page_bytes`: of a page in the layers that keep all positions."""

    page_size: int
    page_bytes: int
    window: WindowPages

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: torch.dtype, context: int, step_tokens: int) -> CachePages:
        """`dtype`: of keys and values; `context`: maximum positions of a sequence; `step_tokens`: maximum tokens of a
        step."""
        parts, heads, dim = config.cache_shape
        scale = SCALE_BYTES if dtype == torch.int8 else 0
        layer = page_bytes(page_size, heads, dim + scale, 1, dtype.itemsize, parts)
        sliding = config.layer_kinds.count("sliding") if config.window < context else 0
        full = layer * (config.num_layers - sliding)
        if not sliding:
            return cls(page_size, full, NO_WINDOW)
        window = WindowPages(
            page_bytes=layer * sliding,
            row_pages=-(-config.window // page_size) + 2,  # the window begins and ends within a page
            step_pages=-(-step_tokens // page_size) + 2,
        )
        return cls(page_size, full, window)

    def bytes(self, pages: int, rows: int) -> int:
        """Bytes of a cache with `pages` pages in the layers that keep all positions, and the windows of `rows` rows."""
        return pages * self.page_bytes + self.window.bytes(pages, rows)

    def largest(self, limit: int, rows: int, wanted: int) -> int:
        """The largest number of pages, at most `wanted`, for which a cache with the windows of `rows` rows has at most
        `limit` bytes."""
        return bisect_right(range(1, wanted + 1), limit, key=lambda pages: self.bytes(pages, rows))

    def size(self, options: LoadOptions, device: Device, free: int, context: int) -> CacheSize:
        """The size for a context of `context` positions. `free`: bytes that weights and workspace leave."""
        context_pages = -(-context // self.page_size)
        limit = self._limit(options, device, free, context_pages)
        row_tokens = min(context, device.row_tokens or context)
        most = limit // self.page_bytes if self.page_bytes else context_pages * options.max_rows
        wanted = most
        if options.cache_bytes is None:
            wanted = min(most, -(-max(context, options.max_rows * row_tokens) // self.page_size))
        max_pages = self.largest(limit, 1, most)
        max_window_pages = 0
        if self.window.page_bytes:
            max_window_pages = (limit - max_pages * self.page_bytes) // self.window.page_bytes
        rows = options.max_rows
        pages = self.largest(limit, rows, wanted)
        while rows > 1 and pages < min(wanted, max(context_pages, ROW_WINDOWS * rows * self.window.row_pages)):
            rows //= 2
            pages = self.largest(limit, rows, wanted)
        return CacheSize(pages, rows, max_pages, max_window_pages)

    def _limit(self, options: LoadOptions, device: Device, free: int, context_pages: int) -> int:
        """Maximum bytes of the cache: the size in the options, or the device's share of `free`. One sequence of
        `context_pages` pages may take more."""
        if options.cache_bytes is not None:
            return options.cache_bytes
        share = int(free * device.cache_share)
        return max(share, min(self.bytes(context_pages, 1), int(free * device.context_share)))


def cache_groups(memory: MemoryPlan, window: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a runner. The layers with a window have a group of their own if it saves pages. A model may
    have no other layers."""
    full = CacheGroup(memory.page_size, memory.num_pages)
    if memory.window_pages in (0, memory.num_pages):
        return (full,)
    sliding = CacheGroup(memory.page_size, memory.window_pages, window)
    return (full, sliding) if memory.page_bytes else (sliding,)


def layer_groups(config: ModelConfig, groups: Sequence[CacheGroup]) -> list[int]:
    """For each layer, the index of its cache group."""
    return [int(kind == "sliding" and len(groups) > 1) for kind in config.layer_kinds]
