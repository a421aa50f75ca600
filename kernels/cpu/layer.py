"""Computes a decoder layer in one call of layer.cpp, if all its weights are packed; kernels/ops/layer.py defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..elements.arguments import GATES, ROTATIONS
from ..ops import Ops
from ..ops import layer as reference
from ..ops.layer import DecoderLayer
from ..ops.mlp import GatedMlp
from ..ops.projection import Adapted
from ..ops.step import LayerStep
from .linear import Packed
from .lora import is_supported, tile_arguments

_layer = torch.ops.localllm.layer.default

_NONE = torch.empty(0)


class LayerLora(NamedTuple):
    """The LoRA factors of the four projections of a layer."""

    a: list[Tensor]
    b: list[Tensor]
    widths: list[int]  # number of outputs of each slice of each projection


_NO_ADAPTERS: tuple[Any, ...] = ([], [], [], None, None, None, None)


class Prepared(NamedTuple):
    """A layer, and the arguments of its op that are the same in every step."""

    layer: DecoderLayer
    weights: tuple[Any, ...]  # the first arguments of the op, before those of the step
    heads: int
    numbers: tuple[Any, ...]  # the last arguments of the op, after those of the step
    sinks: Tensor | None
    lora: LayerLora | None  # None: the reference computes steps with adapters


def prepare(layer: DecoderLayer) -> Any:
    """The layer as `Prepared` if one op can compute all of it. Otherwise the layer unchanged, for the reference."""
    products = layer.products
    packed = [product.weight for product in products if isinstance(product.weight, Packed)]
    int4_ops = {product.op for product in products if product.op.startswith("int4")}
    if not packed or len(packed) < len(products) or len(int4_ops) > 1:
        return layer
    weights = (
        _present(layer.before_attention, layer.before_mlp, layer.after_attention, layer.after_mlp),
        _present(layer.query_norm, layer.key_norm),
        [weight.data for weight in packed],
        [_NONE if product.bias is None else product.bias.float() for product in products],
        [weight.format for weight in packed],
        [weight.group for weight in packed],
        int4_ops == {"int4_wide"},
    )
    _, out, _, down = packed
    assert isinstance(layer.mlp, GatedMlp)  # for another MLP `products` is empty, so `packed` too
    gate = GATES[layer.mlp.gate]
    rotation = ROTATIONS[layer.rotation]
    numbers = (down.in_features, gate, rotation, layer.window, layer.eps, layer.offset, layer.scale, layer.soft_cap)
    sinks = None if layer.sinks is None else layer.sinks.float()
    return Prepared(layer, weights, out.in_features // layer.dim, numbers, sinks, _lora(layer, layer.mlp))


def _lora(layer: DecoderLayer, mlp: GatedMlp) -> LayerLora | None:
    """The LoRA factors of the layer; None if it has none, or if no kernel supports them."""
    projections = (layer.qkv, layer.out, mlp.gate_up, mlp.down)
    factors = [projection.lora for projection in projections if isinstance(projection, Adapted)]
    if len(factors) < len(projections) or not all(map(is_supported, factors)):
        return None
    widths = [width for weights in factors for width in weights.widths]
    return LayerLora([weights.a for weights in factors], [weights.b for weights in factors], widths)


def _adapters(layer: Prepared, x: Tensor, step: LayerStep) -> tuple[Any, ...] | None:
    """The op's arguments for the adapters of the step; None if no kernel supports them."""
    if step.adapters is None:
        return _NO_ADAPTERS
    tiles = tile_arguments(step.adapters)
    if tiles is None or layer.lora is None or layer.lora.a[0].dtype != x.dtype:
        return None
    return *layer.lora, *tiles


def _present(*norms: Tensor | None) -> list[Tensor]:
    return [norm for norm in norms if norm is not None]


def decoder(ops: Ops, layer: Any, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py."""
    if not isinstance(layer, Prepared):
        return reference.decoder(ops, layer, x, stream, step)
    plain = layer.layer
    adapters = _adapters(layer, x, step)
    if adapters is None:
        return reference.decoder(ops, plain, x, stream, step)
    rotation = step.rotations[plain.rotation_index]
    pages = step.cache.layers[plain.cache_index]
    rows = step.rows
    places = step.slots, *pages, rows.row_starts, rows.context_lens, rows.page_table
    _layer(x, stream, *layer.weights, *rotation, *places, layer.sinks, layer.heads, *layer.numbers, *adapters)
    if step.answers is None:
        return x, stream
    tokens = step.answers.tokens  # select these tokens, because the op has computed all tokens
    return x.index_select(0, tokens), stream.index_select(0, tokens)
