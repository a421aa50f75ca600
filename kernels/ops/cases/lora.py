"""Test cases of the ops of lora.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..lora import LoraWeights, chunked
from ..step import Adapters, Tiles
from .case import Case, Make


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
        from .. import Ops
        from ..projection import Product

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
