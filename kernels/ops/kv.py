"""Writing the paged key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .case import Case


def store(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
    """Write token t's key and value to slot `slots[t]` = page * page_size + offset, in place.

    key and value [tokens, kv heads, dim]; pages [pages, page_size, kv heads, dim], contiguous; slots [tokens].
    Where slots repeat (padding in page 0) any of the written values may stay.
    """
    key_pages.view(-1, *key.shape[1:]).index_copy_(0, slots, key)
    value_pages.view(-1, *value.shape[1:]).index_copy_(0, slots, value)


def copy_pages(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pages[targets] = pages[sources], in place; all sources are read before any target is written.

    pages [pages, page_size, kv heads, dim]; sources and targets [copies], targets distinct.
    """
    pages.index_copy_(0, targets, pages.index_select(0, sources))


@dataclass(frozen=True, slots=True)
class KV:
    """Which implementation of each cache write a device uses."""

    store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = store
    copy_pages: Callable[[Tensor, Tensor, Tensor], None] = copy_pages


def _store(tokens: int):
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(2, 6, 4, 2, 16, generator=generator).to(dtype)
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


def _copies(sources: list[int], targets: list[int]):
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        pages = torch.randn(6, 4, 2, 16, generator=generator).to(dtype)
        return {"pages": pages, "sources": torch.tensor(sources), "targets": torch.tensor(targets)}

    return make


CASES = [
    Case("kv.store", "plain", _store(9), mutates=("key_pages", "value_pages")),
    Case("kv.store", "no-tokens", _store(0), mutates=("key_pages", "value_pages")),
    Case("kv.copy_pages", "plain", _copies([1, 2], [4, 5]), mutates=("pages",)),
    Case("kv.copy_pages", "chain", _copies([1, 2, 3], [2, 3, 4]), mutates=("pages",)),
    Case("kv.copy_pages", "swap", _copies([1, 2], [2, 1]), mutates=("pages",)),
    Case("kv.copy_pages", "fan-out", _copies([3, 3], [1, 5]), mutates=("pages",)),
]
