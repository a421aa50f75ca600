"""The memory of the paged KV cache: the pages of each cache group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...engine.batch import Ints
from ...kernels.ops.step import Cache
from .copies import copy_entries
from .device import Device
from .states import States

COPY_PAGES = 64  # number of pages, of all layers together, that are copied at a time


class PagedKV:
    """The pages of the layers of one cache group.

    The tensors `keys` and `values` are each [layers, num_pages + 1, page_size, kv_heads, dim of the part]; page 0 is
    padding. A latent cache has one part, its keys, and no values; or two, see step.Cache.

    All parts are one allocation, which is not cleared, so the system maps memory only for used pages. A page is written
    before it is read: attention reads nothing beyond the context of a row. Only page 0 is cleared: in the place of
    pages that a window has passed, kernels may read and mask page 0.
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
        for pages in self._copied:
            pages[:, 0].zero_()

    def clear(self) -> None:
        """Fill all pages with zeros."""
        for pages in self._copied:
            pages.zero_()

    def copy(self, copies: Ints, device: Device) -> None:
        """Copy pages by `copies` [copies, 2], rows of (source, target). All sources are read before any write."""
        copy_entries(self._copied, copies, COPY_PAGES, device)


class GroupedKV:
    """The pages and states of all layers of a model. `keys` and `values` are those of the only stack, or have one
    tensor for each layer if there are several stacks."""

    def __init__(
        self,
        stacks: Sequence[PagedKV],
        stack_groups: Sequence[int],
        layer_stacks: Sequence[int],
        layer_groups: Sequence[int],
        states: States | None = None,
    ) -> None:
        """`stacks`: the pages of layers of one shape in one cache group. `stack_groups`: for each stack, the index of
        its cache group. `layer_stacks`: for each layer with pages, the index of its stack, which has its layers in
        order. `layer_groups`: for each layer with keys and values, the index of its cache group. `states`: None if no
        layer has a recurrent state."""
        self.groups = tuple(stacks)
        self._stack_groups = tuple(stack_groups)
        cache = stacks[0].cache if len(stacks) == 1 else _joined(stacks, layer_stacks, layer_groups)
        self.states = states
        self.cache = cache if states is None else replace(cache, states=states.layers)
        self.keys = self.cache.keys
        self.values = self.cache.values

    def clear(self) -> None:
        """Fill all pages with zeros."""
        for group in self.groups:
            group.clear()

    def copy(self, copies: Sequence[Ints], device: Device) -> None:
        """Copy pages of each group, see PagedKV.copy."""
        for stack, group in zip(self.groups, self._stack_groups, strict=True):
            stack.copy(copies[group], device)


def _joined(groups: Sequence[PagedKV], layer_stacks: Sequence[int], layer_groups: Sequence[int]) -> Cache:
    """The cache of all layers of the stacks; see GroupedKV."""

    def of_layers(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...] | None:
        """The tensor of each layer, from the tensors [layers of the stack, …] of the stacks."""
        stacks = [iter(tensor) for tensor in tensors if tensor is not None]
        return tuple(next(stacks[stack]) for stack in layer_stacks) if stacks else None

    keys = of_layers([group.keys for group in groups])
    assert keys is not None
    values = of_layers([group.values for group in groups])
    groups_of_layers = tuple(layer_groups) if any(layer_groups) else ()
    return Cache(keys, values, of_layers([group.scales for group in groups]), groups_of_layers)
