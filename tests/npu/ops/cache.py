"""Writers of the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .rules import Call, Changes, Op, contiguous, dtype_of, rule

_CACHED = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)


def _scatter(c: Call, slots: torch.Tensor) -> None:
    """Write keys and values to the rows of the caches [blocks, block, heads, dim]. A negative slot is padding."""
    for rows, cache in ((c.key, c.key_cache), (c.value, c.value_cache)):
        places = cache.view(-1, *cache.shape[2:])
        if len(slots) and int(slots.max()) >= len(places):
            raise IndexError(f"slot {int(slots.max())} is not in a cache of {len(places)} slots")
        places[slots[slots >= 0].long()] = rows[slots >= 0]


def _pages() -> Changes:
    return {
        "key": torch.randn(3, 2, 16),
        "value": torch.randn(3, 2, 16),
        "key_cache": torch.zeros(4, 128, 2, 16),
        "value_cache": torch.zeros(4, 128, 2, 16),
    }


class ScatterPaKvCache(Op):
    """The second scene of the documentation: key [tokens, heads, dim], cache [blocks, block, heads, dim]."""

    names = ("npu::npu_scatter_pa_kv_cache",)

    def example(self) -> Changes:
        return {**_pages(), "slot_mapping": torch.tensor([5, 130, 7], dtype=torch.int32), "cache_mode": "Norm"}

    def check(self, c: Call) -> None:
        tensors = (c.key, c.value, c.key_cache, c.value_cache)
        rule(c.cache_mode in (None, "Norm"), "npu_scatter_pa_kv_cache: a cache in ND needs cache_mode Norm or None")
        is_plain = c.compress_lens is c.seq_lens is c.compress_seq_offsets is None and c.key.dim() == 3
        rule(is_plain, "npu_scatter_pa_kv_cache: the reference has no compressed caches")
        rule(contiguous(*tensors, c.slot_mapping), "npu_scatter_pa_kv_cache: tensors are contiguous")
        rule(c.key_cache.dim() == c.value_cache.dim() == 4, "npu_scatter_pa_kv_cache: caches have 4 dimensions")
        rule(len({t.dtype for t in tensors}) == 1, "npu_scatter_pa_kv_cache: keys, values and caches have one dtype")
        rule(dtype_of(c.key, *_CACHED), "npu_scatter_pa_kv_cache: the dtype is a float or an integer of the list")
        is_int = dtype_of(c.slot_mapping, torch.int32, torch.int64)
        rule(is_int, "npu_scatter_pa_kv_cache: slot_mapping is int32 or int64")
        rule(
            c.key.shape[:2] == c.value.shape[:2],
            "npu_scatter_pa_kv_cache: key and value have the same tokens and heads",
        )
        rule(c.slot_mapping.shape == c.key.shape[:1], "npu_scatter_pa_kv_cache: slot_mapping has a slot for each token")
        fits = c.key.shape[1:] == c.key_cache.shape[2:] and c.value.shape[1:] == c.value_cache.shape[2:]
        rule(fits, "npu_scatter_pa_kv_cache: a slot of the cache has the shape of a key")

    def compute(self, c: Call) -> Any:
        _scatter(c, c.slot_mapping)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "cache_mode Norm", {"cache_mode": "PA_NZ"}
        yield "no compressed caches", {"compress_lens": torch.ones(3, 2, dtype=torch.int32)}
        yield "contiguous", {"key": torch.randn(3, 16, 2).transpose(1, 2)}
        yield "4 dimensions", {"key_cache": c.key_cache.flatten(2)}
        yield "one dtype", {"value_cache": c.value_cache.half()}
        names = ("key", "value", "key_cache", "value_cache")
        yield "of the list", {name: vars(c)[name].double() for name in names}
        yield "int32 or int64", {"slot_mapping": c.slot_mapping.short()}
        yield "same tokens and heads", {"value": torch.randn(3, 4, 16)}
        yield "slot for each token", {"slot_mapping": c.slot_mapping[:2]}
        yield "shape of a key", {"key_cache": torch.zeros(4, 128, 2, 32)}


class ReshapeAndCache(Op):
    """No documentation in the wheel: the rules are those of the ATB operation of this name."""

    names = ("atb::_npu_reshape_and_cache",)

    def example(self) -> Changes:
        return {**_pages(), "slot_indices": torch.tensor([5, 130, 7], dtype=torch.int32)}

    def check(self, c: Call) -> None:
        tensors = (c.key, c.value, c.key_cache, c.value_cache)
        rule(contiguous(*tensors, c.slot_indices), "_npu_reshape_and_cache: tensors are contiguous")
        rule(dtype_of(c.slot_indices, torch.int32), "_npu_reshape_and_cache: slot_indices are int32")
        rule(len({t.dtype for t in tensors}) == 1, "_npu_reshape_and_cache: keys, values and caches have one dtype")
        rule(c.key.dim() == 3 and c.key_cache.dim() == 4, "_npu_reshape_and_cache: keys have 3, caches 4 dimensions")
        fits = c.key.shape[1:] == c.key_cache.shape[2:] and c.value.shape[1:] == c.value_cache.shape[2:]
        rule(fits, "_npu_reshape_and_cache: a slot of the cache has the shape of a key")
        rule(c.slot_indices.shape == c.key.shape[:1], "_npu_reshape_and_cache: slot_indices has a slot for each token")

    def compute(self, c: Call) -> Any:
        _scatter(c, c.slot_indices)

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "contiguous", {"key": torch.randn(3, 16, 2).transpose(1, 2)}
        yield "are int32", {"slot_indices": c.slot_indices.long()}
        yield "one dtype", {"value_cache": c.value_cache.half()}
        yield "caches 4 dimensions", {"key_cache": c.key_cache.flatten(2)}
        yield "shape of a key", {"key_cache": torch.zeros(4, 128, 2, 32)}
        yield "slot for each token", {"slot_indices": c.slot_indices[:2]}


class ScatterNdUpdate(Op):
    names = ("npu::npu_scatter_nd_update_",)

    def example(self) -> Changes:
        indices = torch.tensor([[5], [2]], dtype=torch.int32)
        return {"input": torch.zeros(8, 3, 4), "indices": indices, "updates": torch.randn(2, 3, 4)}

    def check(self, c: Call) -> None:
        rule(dtype_of(c.indices, torch.int32, torch.int64), "npu_scatter_nd_update_: indices are int32 or int64")
        rule(c.updates.dtype == c.input.dtype, "npu_scatter_nd_update_: updates have the dtype of the input")
        depth = c.indices.shape[-1]
        rule(depth <= c.input.dim(), "npu_scatter_nd_update_: an index has at most the dimensions of the input")
        shape = c.indices.shape[:-1] + c.input.shape[depth:]
        rule(c.updates.shape == shape, "npu_scatter_nd_update_: updates have the shape that the indices select")

    def compute(self, c: Call) -> Any:
        c.input[tuple(c.indices.long().unbind(-1))] = c.updates
        return c.input

    def wrong(self, c: Call) -> Iterator[tuple[str, Changes]]:
        yield "int32 or int64", {"indices": c.indices.short()}
        yield "dtype of the input", {"updates": c.updates.half()}
        yield "at most the dimensions", {"indices": torch.zeros(2, 4, dtype=torch.int32)}
        yield "the indices select", {"updates": c.updates[:, :2]}


OPS = (ScatterPaKvCache(), ReshapeAndCache(), ScatterNdUpdate())
