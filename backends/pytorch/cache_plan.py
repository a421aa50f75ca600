"""The pages and the limit of the KV cache of a model on a device of torch, and the cache groups of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...engine import cache_plan
from ...engine.cache_plan import CachePages
from ...engine.files.families import LayerKind
from ...engine.files.layer_kinds import FULL, SLIDING
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
    scale = SCALE_BYTES if dtype == torch.int8 else 0
    kinds = config.cached_kinds

    def size(kind: LayerKind) -> int:
        parts, heads, dim = stack_shape(config, kind)
        return kinds.count(kind) * page_bytes(page_size, heads, dim + scale, 1, dtype.itemsize, parts)

    pages = CachePages.of(page_size, size(FULL), size(SLIDING), config.window, context, step_tokens)
    return replace(pages, state_bytes=config.state_bytes)


def stack_shape(config: ModelConfig, kind: LayerKind) -> tuple[int, int, int]:
    """As ModelConfig.cache_shape, of the layers of a kind."""
    parts, *shape = config.cache_shape
    heads, dim = shape if config.latent else config.heads_of(kind)
    return parts, heads, dim


class Stack(NamedTuple):
    """Layers of one cache group with pages of one shape."""

    group: int
    kind: LayerKind  # of the layers; of the first one if all kinds have one shape


def cache_stacks(config: ModelConfig, groups: Sequence[CacheGroup]) -> list[Stack]:
    """The stack of each layer that has a cache."""
    kinds = config.cached_kinds
    is_alike = stack_shape(config, FULL) == stack_shape(config, SLIDING)
    return [
        Stack(group, kinds[0] if is_alike else kind)
        for group, kind in zip(layer_groups(config, groups), kinds, strict=False)
    ]


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
