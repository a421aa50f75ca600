"""LoRA products on the CPU (products.cpp); kernels/ops/lora.py defines them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...compiled.arguments import FLOATS
from ...ops import lora as reference
from ...ops.lora import LoraWeights
from ...ops.step import Adapters

_add = torch.ops.localllm.lora_add.default
_embedding = torch.ops.localllm.lora_embedding.default

MAX_SLICES = 3  # same as MAX_LORA_SLICES in kernels.h


class TileArguments(NamedTuple):
    """The arguments of the LoRA ops that describe the tokens of a step."""

    scales: Tensor
    order: Tensor
    starts: Tensor
    slots: Tensor


def tile_arguments(adapters: Adapters) -> TileArguments | None:
    """The tiles of the adapters; None if they have no tiles, so that the reference computes the step."""
    if adapters.tiles is None:
        return None
    order, starts, slots, _ = adapters.tiles
    return TileArguments(adapters.scales, order, starts, slots)


def is_supported(weights: LoraWeights) -> bool:
    """True if the kernels support these LoRA factors."""
    return len(weights.widths) <= MAX_SLICES and weights.a.dtype in FLOATS


def add(out: Tensor, x: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    tiles = tile_arguments(adapters)
    has_dense_rows = x.stride(1) == out.stride(1) == 1
    has_types = x.dtype == weights.a.dtype and out.dtype in FLOATS
    if tiles is None or not has_dense_rows or not has_types or not is_supported(weights):
        reference.add(out, x, weights, adapters)
        return
    _add(out, x, weights.a, weights.b, weights.widths, *tiles)


def embedding(out: Tensor, tokens: Tensor, weights: LoraWeights, adapters: Adapters) -> None:
    tiles = tile_arguments(adapters)
    if tiles is None or out.stride(1) != 1 or out.dtype not in FLOATS or not is_supported(weights):
        reference.embedding(out, tokens, weights, adapters)
        return
    _embedding(out, tokens, weights.a, weights.b, weights.widths, *tiles)
