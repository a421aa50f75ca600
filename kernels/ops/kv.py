"""Writes to the paged KV cache, alone or fused with head norms and rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .linear_int8 import rounded
from .norm import Norm
from .rope import Rope

Rotation = Literal["neox", "interleaved"]  # names of the fields of Rope


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]` = page * page_size + offset, in place.

    key and value [tokens, kv heads, dim]; pages [pages, page_size, kv heads, dim], contiguous; slots [tokens].
    If tokens have the same slot (padding in page 0), any one of their values may remain. Pages may have another float
    dtype; values are clamped to the range of a float8 dtype.
    """
    _put(key, key_pages, slots)
    _put(value, value_pages, slots)


def _put(x: Tensor, pages: Tensor, slots: Tensor) -> None:
    places = pages.view(-1, *x.shape[1:])
    if pages.itemsize == 1:  # copy as bytes, because index_copy_ does not support float8
        limit = torch.finfo(pages.dtype).max
        places.view(torch.uint8).index_copy_(0, slots, x.clamp(-limit, limit).to(pages.dtype).view(torch.uint8))
    else:
        places.index_copy_(0, slots, x.to(pages.dtype))


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pages[:, targets] = pages[:, sources], in place; all sources are read before any target is written.

    pages [arrays, pages, page_size, kv heads, dim], contiguous; an array has the keys or the values of a layer.
    sources and targets [copies] int64, targets distinct. Allocates memory for all copied pages.
    """
    # index_copy_ does not support float8, so these pages are copied as bytes.
    supported = pages.view(torch.uint8) if pages.itemsize == 1 else pages
    supported.index_copy_(1, targets, supported.index_select(1, sources))


class Append(NamedTuple):
    """The arguments of `append` that belong to a layer. They are the same in every step."""

    key_pages: Tensor  # the pages as in `store`
    value_pages: Tensor
    rotation: Rotation
    query_norm: Tensor | None = None  # [dim]; both norms are None if heads are not normalised
    key_norm: Tensor | None = None
    eps: float = 1e-6  # eps and offset as in norm.rms
    offset: float = 0.0
    scales: Tensor | None = None  # of int8 pages, as in `store_int8`

    @property
    def kv_heads(self) -> int:
        return self.key_pages.shape[2]

    def queries(self, qkv: Tensor) -> Tensor:
        """The queries [tokens, heads, dim], a view of `qkv`."""
        return qkv.narrow(1, 0, qkv.shape[1] - 2 * self.kv_heads)


def store_int8(key: Tensor, value: Tensor, target: Append, slots: Tensor) -> None:
    """As `store`, to int8 pages: the head of a token is rounded as in linear_int8.rounded, and its scale is written to
    target.scales [2, pages, kv heads, page_size] float32, keys first."""
    heads = [rounded(x) for x in (key, value)]
    for (integers, _), pages in zip(heads, (target.key_pages, target.value_pages), strict=True):
        pages.view(-1, *key.shape[1:]).index_copy_(0, slots, integers.to(torch.int8))
    store_scales(torch.cat([scale for _, scale in heads], dim=2), target, slots)


def store_scales(scales: Tensor, target: Append, slots: Tensor) -> None:
    """Write the scales [tokens, kv heads, 2] of the heads in `slots` to target.scales."""
    assert target.scales is not None
    size = target.scales.shape[3]
    target.scales.permute(1, 3, 2, 0)[slots // size, slots % size] = scales.float()


def composed(
    norm: Norm, rope: Rope, store: Callable[..., None], store_int8: Callable[..., None] = store_int8
) -> Callable[..., Tensor]:
    """An `append` composed of these ops, for a device without a fused `append`."""

    def append(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, target: Append) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values -> queries [tokens, heads, dim].

        qkv [tokens, heads + 2 * kv heads, dim], queries first, values last; an implementation may overwrite it and
        return a view of it. cos and sin as in rope, slots as in kv.store.
        """
        query, key, value = qkv.split((qkv.shape[1] - 2 * target.kv_heads, target.kv_heads, target.kv_heads), dim=1)
        if target.query_norm is not None:
            query = norm.rms(query, target.query_norm, target.eps, target.offset)
        if target.key_norm is not None:
            key = norm.rms(key, target.key_norm, target.eps, target.offset)
        rotate = rope.neox if target.rotation == "neox" else rope.interleaved
        query, key = rotate(query, key, cos, sin)
        if target.scales is None:
            store(key, value, target.key_pages, target.value_pages, slots)
        else:
            store_int8(key, value, target, slots)
        return query

    return append


append = composed(Norm(), Rope(), store)


def append_latent(
    heads: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, slots: Tensor, pages: tuple[Tensor, ...]
) -> Tensor:
    """Rotate queries and keys, store the keys in a latent cache -> queries [tokens, query heads, dim].

    heads [tokens, query heads + 1, dim], the key last. The first dimensions are rotated, as in rope; the others are in
    the space of the latents. pages: one tensor [pages, page_size, 1, dim], or one with the rotated dimensions and one
    with the others; contiguous. slots as in `store`. An implementation may overwrite heads and return a view of it.
    """
    query, key = heads.split((heads.shape[1] - 1, 1), dim=1)
    rotate = Rope().neox if rotation == "neox" else Rope().interleaved
    query, key = rotate(query, key, cos, sin)
    parts = (key,) if len(pages) == 1 else key.split([each.shape[3] for each in pages], dim=2)
    for part, places in zip(parts, pages, strict=True):
        _put(part, places, slots)
    return query


@dataclass(frozen=True, slots=True)
class KV:
    """The implementations of the cache writes on a device."""

    store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = store
    copy_pages: Callable[[Tensor, Tensor, Tensor], None] = copy_pages
    append: Callable[..., Tensor] = append
    append_latent: Callable[..., Tensor] = append_latent
