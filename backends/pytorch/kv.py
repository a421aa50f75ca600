"""The memory of the paged KV cache."""

from __future__ import annotations

import numpy as np
import torch

from ...engine.batch import Ints
from ...kernels.ops.step import Cache
from .device import Device

TOGETHER = 64  # pages of all layers in one copy


class PagedKV:
    """`keys` and `values`, [layers, num_pages + 1, page_size, kv heads, head dim] each; page 0 is for padding.

    One allocation, which is never cleared, so the system maps memory only for used pages. A page is written before it
    is read, and attention reads nothing beyond the context of a row.
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
    ) -> None:
        shape = (2, layers, num_pages + 1, page_size, kv_heads, head_dim)
        pages = torch.empty(shape, dtype=dtype, device=device)
        self.keys, self.values = pages
        self.cache = Cache(self.keys, self.values)
        self._parts = pages.flatten(0, 1)  # keys and values of every layer

    def copy(self, copies: Ints, device: Device) -> None:
        """Page copies [copies, 2] of (source, target), all read before any is written."""
        if not len(copies):
            return
        # Without a page that is source and target, copies in parts take less memory.
        together = len(copies) if np.isin(copies[:, 0], copies[:, 1]).any() else TOGETHER
        for start in range(0, len(copies), together):
            sources, targets = device.send(copies[start : start + together].T.astype(np.int64))
            device.ops.kv.copy_pages(self._parts, sources, targets)
