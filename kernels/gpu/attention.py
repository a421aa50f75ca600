"""The queries and caches that the attention kernels of the CUDA library support."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.attention import Attend

TYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


class Limits(NamedTuple):
    """The shapes that one attention kernel supports."""

    dims: tuple[int, ...]  # head sizes
    group: int  # largest number of query heads that share a kv head
    page_size: Callable[[int], bool]
    fp8_step: int = 0  # strides of an fp8 cache are multiples of this number of elements; 0: no fp8 cache

    def fit(self, query: Tensor, attend: Attend) -> bool:
        heads, dim = query.shape[1:]
        sizes = dim in self.dims and heads <= self.group * attend.kv_heads and self.page_size(attend.page_size)
        return sizes and query.dtype in TYPES and self._reads(query, attend.key_pages) and loads_aligned(query, attend)

    def _reads(self, query: Tensor, pages: Tensor) -> bool:
        """True if the kernel reads a cache of this dtype."""
        if pages.dtype != FP8:
            return pages.dtype == query.dtype
        _, slot, kv_head, _ = pages.stride()
        return self.fp8_step > 0 and slot % self.fp8_step == kv_head % self.fp8_step == 0


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def loads_aligned(query: Tensor, attend: Attend) -> bool:
    """True if the kernels can read these tensors with loads of 16 bytes.

    Heads and pages must be dense and begin at multiples of 8 elements and 16 bytes. Both caches must have the same
    strides.
    """
    token, head, query_step = query.stride()
    page, slot, kv_head, cache_step = attend.key_pages.stride()
    dense = query_step == cache_step == 1 and page == slot * attend.page_size
    alike = attend.value_pages.stride() == attend.key_pages.stride()
    if not dense or not alike or any(stride % 8 for stride in (token, head, slot, kv_head)):
        return False
    return all(tensor.data_ptr() % 16 == 0 for tensor in (query, attend.key_pages, attend.value_pages))
