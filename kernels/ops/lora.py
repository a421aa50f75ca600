"""LoRA products: each token adds the low-rank product of its own adapter to a projection.

A row of the batch chooses an adapter slot and a scale. Slot 0 is the base model and adds nothing. The factor
alpha / rank of an adapter is multiplied into its B at load; the scale of the request multiplies the result of A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .projection import Product, Projection
from .step import Adapters, HeadStep, LayerStep

if TYPE_CHECKING:
    from . import Ops

Ints = NDArray[np.int32]


class LoraWeights(NamedTuple):
    """The LoRA factors of one projection, for all adapter slots. The factors of unused ranks and modules are zero.

    A projection that computes several modules (q, k and v) has a slice for each: slice s has the ranks
    s * rank … (s + 1) * rank - 1 of `a` and its own outputs of `b`.
    """

    a: Tensor  # [slots, slices * rank, in_features]; each slot is dense
    b: Tensor  # [slots, out_features, rank]; each slot is dense
    widths: tuple[int, ...]  # [slices] outputs of each slice; their sum is out_features

    @property
    def rank(self) -> int:
        """The maximum rank of an adapter."""
        return self.b.shape[2]


class Adapted(NamedTuple):
    """A projection with the LoRA factors of all adapter slots."""

    base: Projection
    lora: LoraWeights

    @property
    def product(self) -> Product | None:
        return self.base.product

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if step is None or step.adapters is None:
            return self.base(x, ops, step, dtype)
        return ops.lora.project(self.base, x, ops, self.lora, step.adapters, dtype)


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    """out[t] += scale[t] * B[slot[t]] (A[slot[t]] x[t]) for each token t, in place.

    out [tokens, out_features], x [tokens, in_features], of any float dtype. The products with A and all sums are
    float32 or wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if adapters.segments is None:
        for slot in adapters.used:
            _add_slot(out, x.to(wide), adapters.slots == slot, weights, slot, adapters.scales)
        return
    for start, end, slot in adapters.segments:
        if slot:
            inner = x[start:end].to(wide) @ weights.a[slot].to(wide).T
            _expand(out[start:end], inner * adapters.scales[start:end, None], weights, slot)


def _add_slot(out: Tensor, x: Tensor, mask: Tensor, weights: LoraWeights, slot: int, scales: Tensor) -> None:
    """Compute all tokens with the adapter of `slot`, and add the results where `mask` is set. A graph can capture this,
    because no shape depends on the mask."""
    inner = x @ weights.a[slot].to(x.dtype).T
    _expand(out, inner * torch.where(mask, scales, 0.0)[:, None], weights, slot)


def _expand(out: Tensor, inner: Tensor, weights: LoraWeights, slot: int) -> None:
    """out += inner @ Bᵀ, slice by slice: inner [tokens, slices * rank]."""
    targets = out.split(weights.widths, dim=1)
    factors = weights.b[slot].split(weights.widths)
    for target, part, b in zip(targets, inner.split(weights.rank, dim=1), factors, strict=True):
        target.copy_(target + part @ b.to(inner.dtype).T)


def project(
    base: Projection, x: Tensor, ops: Ops, weights: LoraWeights, adapters: Adapters, dtype: torch.dtype | None = None
) -> Tensor:
    """The projection `base` of x [tokens, in_features], plus the LoRA product -> [tokens, out_features] in `dtype`, by
    default x's dtype."""
    result = base(x, ops, None, dtype)
    ops.lora.add(result, x, weights, adapters)
    return result


def embedding(out: Tensor, tokens: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    """out[t] += scale[t] * B[slot[t]] A[slot[t]][:, token[t]] for each token t, in place.

    out [tokens, dim], tokens [tokens] int32, weights.a [slots, rank, vocab].
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    for slot in adapters.used:
        scales = torch.where(adapters.slots == slot, adapters.scales, 0.0)
        inner = F.embedding(tokens, weights.a[slot].T).to(wide)
        _expand(out, inner * scales[:, None], weights, slot)


def chunked(slots: NDArray[np.int32], chunk: int) -> tuple[Ints, Ints, Ints]:
    """The fields order [tokens], starts [tiles + 1] and slots [tiles] of `Tiles`, from the adapter slots [tokens]."""
    order = np.argsort(np.where(slots > 0, slots, np.iinfo(np.int32).max), kind="stable").astype(np.int32)
    used, counts = np.unique(slots[slots > 0], return_counts=True)
    tiles = -(-counts // chunk)
    tile_slots = np.repeat(used, tiles).astype(np.int32)
    first = np.repeat(counts.cumsum() - counts, tiles)  # start of each tile's slot in `order`
    index = np.arange(len(tile_slots)) - np.repeat(tiles.cumsum() - tiles, tiles)
    starts = np.append(first + index * chunk, counts.sum()).astype(np.int32)
    return order, starts, tile_slots


def chunked_rows(slots: Ints, lens: NDArray[np.integer], chunk: int) -> tuple[Ints, Ints, Ints]:
    """Like `chunked`, but each tile has tokens of one row only. slots [rows]: adapter slots; lens [rows]: tokens."""
    rows = np.where(slots > 0, np.arange(1, len(slots) + 1, dtype=np.int32), np.int32(0))
    order, starts, tile_rows = chunked(np.repeat(rows, lens), chunk)
    return order, starts, slots[tile_rows - 1]


@dataclass(frozen=True, slots=True)
class Lora:
    """The implementations of the LoRA products on a device."""

    add: Callable[[Tensor, Tensor, LoraWeights, Adapters], None] = add
    embedding: Callable[[Tensor, Tensor, LoraWeights, Adapters], None] = embedding
    project: Callable[..., Tensor] = project
