"""The pages and the limit of the KV cache of a model on a device of torch, and the cache groups of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...engine import cache_plan
from ...engine.cache_plan import CachePages
from ...engine.files.model_config import ModelConfig
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import CacheGroup, page_bytes
from .device import Device

INTERVAL = 256  # positions between snapshots; a longer interval takes fewer copies, and recomputes more after a hit
CONTEXT_INTERVALS = 16  # a context has at least this number of intervals
SCALE_BYTES = 4  # of a head of a token in an int8 KV cache


def cache_pages(config: ModelConfig, page_size: int, dtype: torch.dtype, context: int, step_tokens: int) -> CachePages:
    """The pages of a model. `dtype`: of keys and values; `context` and `step_tokens` as in CachePages.of."""
    parts, heads, dim = config.cache_shape
    scale = SCALE_BYTES if dtype == torch.int8 else 0
    layer = page_bytes(page_size, heads, dim + scale, 1, dtype.itemsize, parts)
    sliding = config.layer_kinds.count("sliding")
    full = len(config.attention_layers) - sliding
    pages = CachePages.of(page_size, layer * full, layer * sliding, config.window, context, step_tokens)
    return replace(pages, state_bytes=config.state_bytes)


def cache_limit(pages: CachePages, options: LoadOptions, device: Device, free: int, context: int) -> int:
    """Maximum bytes of the cache: the size in the options, or the device's share of `free`, the bytes that weights and
    workspace leave. One sequence of `context` positions may take more."""
    if options.cache_bytes is not None:
        return options.cache_bytes
    share = int(free * device.cache_share)
    needed = pages.bytes(-(-context // pages.page_size), 1)
    return max(share, min(needed, int(free * device.context_share)))


def cache_groups(memory: MemoryPlan, window: int) -> tuple[CacheGroup, ...]:
    """The cache groups of a runner: those of engine.cache_plan that have layers."""
    return cache_plan.cache_groups(memory, window)[0 if memory.page_bytes else -1 :]


def snapshot_interval(context: int, page_size: int) -> int:
    """Positions between the snapshots of a sequence: a multiple of the page size."""
    return max(1, min(INTERVAL, context // CONTEXT_INTERVALS) // page_size) * page_size


def layer_groups(config: ModelConfig, groups: Sequence[CacheGroup]) -> list[int]:
    """For each layer with pages, the index of its cache group."""
    kinds = [config.layer_kinds[layer] for layer in config.attention_layers]
    return [int(kind == "sliding" and len(groups) > 1) for kind in kinds]
