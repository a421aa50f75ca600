"""LoRA products: each token adds the low-rank product of its own adapter to a projection.

A row of the batch chooses an adapter slot and a scale. Slot 0 is the base model and adds nothing. The factor
alpha / rank of an adapter is multiplied into its B at load; the scale of the request multiplies the result of A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from .cases.case import Case, Make
from .step import Adapters, Tiles

if TYPE_CHECKING:
    from . import Ops
    from .projection import Projection

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
    """As `chunked`, but each tile has tokens of one row only. slots [rows]: adapter slots; lens [rows]: tokens."""
    rows = np.where(slots > 0, np.arange(1, len(slots) + 1, dtype=np.int32), np.int32(0))
    order, starts, tile_rows = chunked(np.repeat(rows, lens), chunk)
    return order, starts, slots[tile_rows - 1]


@dataclass(frozen=True, slots=True)
class Lora:
    """The implementations of the LoRA products on a device."""

    add: Callable[[Tensor, Tensor, LoraWeights, Adapters], None] = add
    embedding: Callable[[Tensor, Tensor, LoraWeights, Adapters], None] = embedding
    project: Callable[..., Tensor] = project


def random_adapters(rows: list[tuple[int, int]], generator: torch.Generator, captured: bool = False) -> Adapters:
    """Adapters with random scales for rows of (number of tokens, adapter slot), for test inputs."""
    lens = torch.tensor([tokens for tokens, _ in rows])
    slots = torch.tensor([slot for _, slot in rows], dtype=torch.int32).repeat_interleave(lens)
    scales = torch.rand(len(slots), generator=generator) + 0.5
    ends = lens.cumsum(0).tolist()
    segments = tuple((end - tokens, end, slot) for end, (tokens, slot) in zip(ends, rows, strict=True))
    used = tuple(sorted({slot for _, slot in rows} - {0}))
    scales = torch.where(slots > 0, scales, 0.0)
    return Adapters(slots, scales, used, None if captured else segments, _tiles(slots))


def select_adapters(adapters: Adapters, tokens: Tensor) -> Adapters:
    """The adapters of the tokens with the indices `tokens`, for test inputs."""
    slots = adapters.slots[tokens]
    return Adapters(slots, adapters.scales[tokens], adapters.used, None, _tiles(slots))


def _tiles(slots: Tensor) -> Tiles:
    order, starts, tile_slots = map(torch.from_numpy, chunked(slots.numpy(), 16))
    return Tiles(order, starts, tile_slots, 16)


def random_weights(
    ranks: tuple[int, ...], in_features: int, widths: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
) -> LoraWeights:
    """Random LoRA factors, for test inputs. ranks [slots]: in each slot, the factors above its rank are 0."""
    top = max(ranks)
    a = torch.randn(len(ranks), len(widths), top, in_features, generator=generator) / in_features**0.5
    b = torch.randn(len(ranks), sum(widths), top, generator=generator) / top**0.5
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = 0.0
        b[slot, :, rank:] = 0.0
    return LoraWeights(a.flatten(1, 2).to(dtype), b.to(dtype), widths)


def _product(
    rows: list[tuple[int, int]],
    ranks: tuple[int, ...] = (0, 8, 16),
    in_features: int = 64,
    widths: tuple[int, ...] = (48,),
    captured: bool = False,
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        adapters = random_adapters(rows, generator, captured)
        tokens = len(adapters.slots)
        x = torch.randn(tokens, in_features, generator=generator).to(dtype)
        out = torch.randn(tokens, sum(widths), generator=generator).to(dtype)
        return {
            "out": out,
            "x": x,
            "weights": random_weights(ranks, in_features, widths, generator, dtype),
            "adapters": adapters,
        }

    return make


def _projection(
    rows: list[tuple[int, int]], in_features: int = 64, widths: tuple[int, ...] = (64, 32), bias: bool = False
) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        from . import Ops
        from .projection import Product

        arguments = dict(_product(rows, in_features=in_features, widths=widths)(generator, dtype))
        out = arguments.pop("out")
        weight = torch.randn(out.shape[1], in_features, generator=generator) / in_features**0.5
        shift = torch.randn(out.shape[1], generator=generator) if bias else None
        return {"base": Product("dense", weight.to(dtype), shift), "ops": Ops(), **arguments}

    return make


def _lookup(rows: list[tuple[int, int]], captured: bool = False, ranks: tuple[int, ...] = (0, 8, 4)) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Mapping[str, Any]:
        adapters = random_adapters(rows, generator, captured)
        tokens = torch.randint(0, 50, (len(adapters.slots),), generator=generator, dtype=torch.int32)
        out = torch.randn(len(tokens), 48, generator=generator).to(dtype)
        return {
            "out": out,
            "tokens": tokens,
            "weights": random_weights(ranks, 50, (48,), generator, dtype),
            "adapters": adapters,
        }

    return make


_DECODE = [(1, 1), (1, 0), (1, 2), (1, 1), (1, 2)]
_MIXED = [(5, 2), (1, 1), (3, 0), (17, 1), (1, 2)]
_RANKS = (0, 8, 16, 64, 1)

CASES = [
    *(
        Case("lora.add", label, make, mutates=("out",))
        for label, make in [
            ("one-row", _product([(1, 1)])),
            ("one-adapter", _product([(1, 2), (1, 2), (1, 2)])),
            ("decode", _product(_DECODE)),
            ("decode-captured", _product(_DECODE, captured=True)),
            ("prompt", _product([(33, 1)])),
            ("mixed", _product(_MIXED)),
            ("mixed-captured", _product(_MIXED, captured=True)),
            ("qkv", _product(_MIXED, in_features=72, widths=(64, 16, 16))),
            ("gate-up", _product(_DECODE, widths=(96, 96))),
            ("ranks", _product([(2, 1), (1, 4), (1, 3), (4, 2), (1, 0)], _RANKS)),
            ("odd-shape", _product(_MIXED, (0, 3, 5), in_features=37, widths=(29, 7))),
            ("rank-64", _product([(70, 1), (3, 2)], (0, 64, 33), in_features=200, widths=(96, 32, 32))),
            ("rank-256", _product(_MIXED, (0, 256, 130), in_features=72, widths=(64, 16, 16))),
        ]
    ),
    *(
        Case("lora.project", label, make, packs=("base",))
        for label, make in [
            ("one-row", _projection([(1, 1)])),
            ("decode", _projection(_DECODE)),
            ("decode-bias", _projection(_DECODE, bias=True)),
            ("mixed", _projection(_MIXED)),
            ("mixed-bias", _projection(_MIXED, widths=(48, 16, 16), bias=True)),
            ("odd-shape", _projection(_MIXED, 37, (29, 7))),
        ]
    ),
    Case("lora.embedding", "mixed", _lookup(_MIXED), mutates=("out",)),
    Case("lora.embedding", "rank-256", _lookup(_MIXED, ranks=(0, 256, 130)), mutates=("out",)),
    Case("lora.embedding", "decode-captured", _lookup(_DECODE, captured=True), mutates=("out",)),
]
