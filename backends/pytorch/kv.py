"""The paged key-value cache's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.batch import Ints
from .device import Device


class PagedKV:
    """`keys` and `values`, [layers, num_pages + 1, page_size, kv heads, head dim] each; page 0 is for padding.

    One allocation, never cleared (so the system hands out memory only as pages are used): a page is written
    before it is read, and attention reads nothing beyond a row's context.
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
        self.keys, self.values = torch.empty(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Key pages and value pages, [num_pages + 1, page_size, kv heads, head dim] each."""
        return self.keys[index], self.values[index]

    def copy(self, copies: Ints, device: Device) -> None:
        """Page copies [copies, 2] of (source, target), all read before any is written."""
        if not len(copies):
            return
        sources, targets = device.send(copies.T.astype("int64"))
        for pages in (*self.keys, *self.values):
            device.ops.kv.copy_pages(pages, sources, targets)
