"""LoRA products on the CPU (lora.cpp); kernels/ops/lora.py defines them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..elements.arguments import FLOATS
from ..ops import lora as reference
from ..ops.lora import LoraWeights, chunked
from ..ops.step import Adapters

_add = torch.ops.localllm.lora_add.default
_embedding = torch.ops.localllm.lora_embedding.default

MAX_SLICES = 3  # MAX_LORA_SLICES in kernels.h
CHUNK = 64  # tokens of a tile; the kernels support any number


class TileArguments(NamedTuple):
    """The arguments of the LoRA ops that describe the tokens of a step."""

    scales: Tensor
    order: Tensor
    starts: Tensor
    slots: Tensor


def tile_arguments(adapters: Adapters) -> TileArguments:
    """The tiles of the adapters. Adapters of selected tokens have no tiles, so the function computes them."""
    if adapters.tiles is not None:
        order, starts, slots, _ = adapters.tiles
        return TileArguments(adapters.scales, order, starts, slots)
    order, starts, slots = map(torch.from_numpy, chunked(adapters.slots.numpy(), CHUNK))
    return TileArguments(adapters.scales, order, starts, slots)


def is_supported(weights: LoraWeights) -> bool:
    """True if the kernels compute these factors."""
    return len(weights.widths) <= MAX_SLICES and weights.a.dtype in FLOATS


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    has_dense_rows = x.stride(1) == out.stride(1) == 1
    if not has_dense_rows or not is_supported(weights) or x.dtype != weights.a.dtype or out.dtype not in FLOATS:
        reference.add(out, x, weights, adapters)
        return
    _add(out, x, weights.a, weights.b, weights.widths, *tile_arguments(adapters))


def embedding(out: Tensor, tokens: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    if out.stride(1) != 1 or not is_supported(weights) or out.dtype not in FLOATS:
        reference.embedding(out, tokens, weights, adapters)
        return
    _embedding(out, tokens, weights.a, weights.b, weights.widths, *tile_arguments(adapters))
