"""Writes to the paged KV cache, alone or fused with head norms and rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .cases.case import Case, Make
from .norm import Norm
from .rope import Rope

Rotation = Literal["neox", "interleaved"]  # names of the fields of Rope


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]` = page * page_size + offset, in place.

    key and value [tokens, kv heads, dim]; pages [pages, page_size, kv heads, dim], contiguous; slots [tokens].
    If tokens have the same slot (padding in page 0), any one of their values may remain. Pages may have another float
    dtype; values are clamped to the range of float8_e4m3fn.
    """
    _put(key, key_pages, slots)
    _put(value, value_pages, slots)


def _put(x: Tensor, pages: Tensor, slots: Tensor) -> None:
    places = pages.view(-1, *x.shape[1:])
    if pages.dtype == torch.float8_e4m3fn:  # copy as bytes, because index_copy_ does not support float8
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


def composed(norm: Norm, rope: Rope, store: Callable[..., None]) -> Callable[..., Tensor]:
    """An `append` composed of these ops, for a device without a fused `append`."""

    def append(
        qkv: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
        offset: float,
        cos: Tensor,
        sin: Tensor,
        rotation: Rotation,
        slots: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values -> queries [tokens, heads, dim].

        qkv [tokens, heads + 2 * kv heads, dim], queries first, values last; an implementation may overwrite it and
        return a view of it. query_norm and key_norm [dim], or both None if heads are not normalised; eps and offset as
        in norm.rms, cos and sin as in rope, slots and pages as in kv.store.
        """
        kv_heads = key_pages.shape[2]
        query, key, value = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if query_norm is not None:
            query = norm.rms(query, query_norm, eps, offset)
        if key_norm is not None:
            key = norm.rms(key, key_norm, eps, offset)
        rotate = rope.neox if rotation == "neox" else rope.interleaved
        query, key = rotate(query, key, cos, sin)
        store(key, value, key_pages, value_pages, slots)
        return query

    return append


append = composed(Norm(), Rope(), store)


def append_latent(heads: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation, slots: Tensor, pages: Tensor) -> Tensor:
    """Rotate queries and keys, store the keys in a latent cache -> queries [tokens, query heads, dim].

    heads [tokens, query heads + 1, dim], the key last. The first dimensions are rotated, as in rope; the others are in
    the space of the latents. pages [pages, page_size, 1, dim], contiguous; slots as in `store`. An implementation may
    overwrite heads and return a view of it.
    """
    query, key = heads.split((heads.shape[1] - 1, 1), dim=1)
    rotate = Rope().neox if rotation == "neox" else Rope().interleaved
    query, key = rotate(query, key, cos, sin)
    _put(key, pages, slots)
    return query


@dataclass(frozen=True, slots=True)
class KV:
    """The implementations of the cache writes on a device."""

    store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = store
    copy_pages: Callable[[Tensor, Tensor, Tensor], None] = copy_pages
    append: Callable[..., Tensor] = append
    append_latent: Callable[..., Tensor] = append_latent


def _store(tokens: int, cache: torch.dtype | None = None) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(2, 6, 4, 2, 16, generator=generator).to(cache or dtype)
        written = torch.randn(2, tokens, 2, 16, generator=generator).to(dtype)
        slots = torch.randperm(24, generator=generator)[:tokens].to(torch.int64)
        return {
            "key": written[0],
            "value": written[1],
            "key_pages": pages[0],
            "value_pages": pages[1],
            "slots": slots,
        }

    return make


def _copies(
    sources: list[int], targets: list[int], parts: int = 3, dim: int = 16, cache: torch.dtype | None = None
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(parts, 6, 4, 2, dim, generator=generator).to(cache or dtype)
        return {"pages": pages, "sources": torch.tensor(sources).long(), "targets": torch.tensor(targets).long()}

    return make


def _append(
    tokens: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 32,
    half: int = 16,
    norms: bool = True,
    offset: float = 0.0,
    rotation: Rotation = "neox",
    cache: torch.dtype | None = None,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        angle = torch.rand(tokens, half, generator=generator) * 100.0
        weights = torch.randn(2, dim, generator=generator) * 0.1 + (1.0 - offset)
        pages = torch.randn(2, 12, 4, kv_heads, dim, generator=generator).to(cache or dtype)
        return {
            "qkv": torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype),
            "query_norm": weights[0].to(dtype) if norms else None,
            "key_norm": weights[1].to(dtype) if norms else None,
            "eps": 1e-6,
            "offset": offset,
            "cos": angle.cos(),
            "sin": angle.sin(),
            "rotation": rotation,
            "slots": torch.randperm(48, generator=generator)[:tokens].to(torch.int64),
            "key_pages": pages[0],
            "value_pages": pages[1],
        }

    return make


def _append_latent(
    tokens: int, heads: int = 4, rank: int = 24, half: int = 4, rotation: Rotation = "interleaved"
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        arguments = _append(tokens, heads - 1, 1, 2 * half + rank, half, False, rotation=rotation)(generator, dtype)
        names = "cos", "sin", "rotation", "slots"
        some = {name: arguments[name] for name in names}
        return {"heads": arguments["qkv"], "pages": arguments["key_pages"], **some}

    return make


_PAGES = ("key_pages", "value_pages")
_FP8 = torch.float8_e4m3fn
_COARSE = {torch.bfloat16: 7e-2}  # half the relative distance between neighbouring float8_e4m3fn values

CASES = [
    Case("kv.append", "plain", _append(9), mutates=_PAGES),
    Case("kv.append", "one-token", _append(1, heads=16, kv_heads=8, dim=128, half=64), mutates=_PAGES),
    Case("kv.append", "no-norms", _append(5, norms=False), mutates=_PAGES),
    Case("kv.append", "gemma", _append(5, offset=1.0), mutates=_PAGES),
    Case("kv.append", "partial", _append(5, half=5), mutates=_PAGES),
    Case("kv.append", "interleaved", _append(7, rotation="interleaved"), mutates=_PAGES),
    Case("kv.append", "odd-head", _append(3, heads=3, kv_heads=1, dim=37, half=11), mutates=_PAGES),
    Case("kv.append", "no-tokens", _append(0), mutates=_PAGES),
    Case("kv.append", "many", _append(33, heads=2, kv_heads=1), mutates=_PAGES),
    Case("kv.append", "float8", _append(9, cache=_FP8), _COARSE, mutates=_PAGES),
    Case(
        "kv.append",
        "float8-interleaved",
        _append(5, dim=128, half=64, rotation="interleaved", cache=_FP8),
        _COARSE,
        mutates=_PAGES,
    ),
    *(
        Case("kv.append_latent", label, make, mutates=("pages",))
        for label, make in [
            ("one-token", _append_latent(1)),
            ("tokens", _append_latent(9)),
            ("no-tokens", _append_latent(0)),
            ("neox", _append_latent(5, rotation="neox")),
            ("one-head", _append_latent(5, heads=1)),
            ("odd-dims", _append_latent(7, heads=3, rank=37, half=5)),
            ("wide", _append_latent(17, heads=16, rank=512, half=32)),
        ]
    ),
    Case("kv.store", "float8", _store(9, cache=_FP8), _COARSE, mutates=_PAGES),
    Case("kv.store", "plain", _store(9), mutates=_PAGES),
    Case("kv.store", "no-tokens", _store(0), mutates=_PAGES),
    Case("kv.copy_pages", "plain", _copies([1, 2], [4, 5]), mutates=("pages",)),
    Case("kv.copy_pages", "chain", _copies([1, 2, 3], [2, 3, 4]), mutates=("pages",)),
    Case("kv.copy_pages", "swap", _copies([1, 2], [2, 1]), mutates=("pages",)),
    Case("kv.copy_pages", "fan-out", _copies([3, 3], [1, 5]), mutates=("pages",)),
    Case("kv.copy_pages", "one-part", _copies([5, 1], [1, 0], parts=1), mutates=("pages",)),
    Case("kv.copy_pages", "many-parts", _copies([2, 4, 0], [0, 2, 3], parts=64), mutates=("pages",)),
    Case("kv.copy_pages", "odd-page", _copies([2, 4], [4, 3], dim=7), mutates=("pages",)),
    Case("kv.copy_pages", "float8", _copies([2, 4], [4, 3], cache=_FP8), mutates=("pages",)),
    Case("kv.copy_pages", "none", _copies([], []), mutates=("pages",)),
]
