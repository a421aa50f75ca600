"""The memory of the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...engine.batch import Ints
from ...kernels.ops.step import Cache
from .device import Device

COPY_PAGES = 64  # number of pages, of all layers together, that are copied at a time


class PagedKV:
    """The tensors `keys` and `values`, each [layers, num_pages + 1, page_size, kv_heads, dim of the part]; page 0 is
    padding. A latent cache has one part, its keys, and no values; or two, see step.Cache.

    All parts are one allocation, which is not cleared, so the system maps memory only for used pages. A page is written
    before it is read: attention reads nothing beyond the context of a row.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        dims: Sequence[int],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """`dims`: dimension of a head in each part."""
        shape = (layers, num_pages + 1, page_size, kv_heads)
        sizes = [math.prod(shape) * dim for dim in dims]
        memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        parts = [part.view(*shape, dim) for part, dim in zip(memory.split(sizes), dims, strict=True)]
        self.keys = parts[0]
        self.values = parts[1] if len(parts) == 2 else None
        self.scales = None  # of int8 pages: see kv.store_int8
        if dtype == torch.int8:
            self.scales = torch.empty(layers, 2, num_pages + 1, kv_heads, page_size, device=device)
        self.cache = Cache(self.keys, self.values, self.scales)
        # Each [arrays, num_pages + 1, …]. Parts of equal dimension are one tensor, so one call copies a page.
        self._copied = parts if len(set(dims)) > 1 else [memory.view(-1, *parts[0].shape[1:])]
        if self.scales is not None:
            self._copied.append(self.scales.flatten(0, 1))

    def clear(self) -> None:
        """Fill all pages with zeros."""
        for pages in self._copied:
            pages.zero_()

    def copy(self, copies: Ints, device: Device) -> None:
        """Copy pages by `copies` [copies, 2], rows of (source, target). All sources are read before any write."""
        if not len(copies):
            return
        # Copy a few pages at a time, which needs less memory; but not if one copy's target is another copy's source.
        is_chain = np.isin(copies[:, 0], copies[:, 1]).any()
        count = len(copies) if is_chain else COPY_PAGES
        for start in range(0, len(copies), count):
            sources, targets = device.send(copies[start : start + count].T.astype(np.int64))
            for pages in self._copied:
                device.ops.kv.copy_pages(pages, sources, targets)
