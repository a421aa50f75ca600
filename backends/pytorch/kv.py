"""The memory of the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch

from ...engine.batch import Ints
from ...kernels.ops.step import Cache
from .device import Device

COPY_PAGES = 64  # number of pages, of all layers together, that are copied at a time


class PagedKV:
    """The tensors `keys` and `values`, each [layers, num_pages + 1, page_size, kv_heads, head_dim]; page 0 is padding.
    A latent cache has one part, its keys, and no values.

    All parts are one allocation, which is not cleared, so the system maps memory only for used pages. A page is written
    before it is read: attention reads nothing beyond the context of a row.
    """

    def __init__(
        self,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        parts: int = 2,
    ) -> None:
        shape = (parts, layers, num_pages + 1, page_size, kv_heads, head_dim)
        pages = torch.empty(shape, dtype=dtype, device=device)
        self.keys = pages[0]
        self.values = pages[1] if parts == 2 else None
        self.cache = Cache(self.keys, self.values)
        self._layer_pages = pages.flatten(0, 1)  # [parts * layers, num_pages + 1, …]: first all keys, then all values

    def clear(self) -> None:
        """Fill all pages with zeros."""
        self._layer_pages.zero_()

    def copy(self, copies: Ints, device: Device) -> None:
        """Copy pages by `copies` [copies, 2], rows of (source, target). All sources are read before any write."""
        if not len(copies):
            return
        # Copy a few pages at a time, which needs less memory; but not if one copy's target is another copy's source.
        is_chain = np.isin(copies[:, 0], copies[:, 1]).any()
        count = len(copies) if is_chain else COPY_PAGES
        for start in range(0, len(copies), count):
            sources, targets = device.send(copies[start : start + count].T.astype(np.int64))
            device.ops.kv.copy_pages(self._layer_pages, sources, targets)
