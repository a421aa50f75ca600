"""A decoder layer in one call of layer.cpp, if all its weights are packed; kernels/ops/layer.py defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..elements.arguments import GATES, ROTATIONS
from ..ops import Ops
from ..ops import layer as reference
from ..ops.layer import DecoderLayer
from ..ops.mlp import GatedMlp
from ..ops.step import LayerStep
from .linear import Packed

_layer = torch.ops.localllm.layer.default

_NONE = torch.empty(0)


class Prepared(NamedTuple):
    """A layer, and the arguments of its op that are the same in every step."""

    layer: DecoderLayer
    weights: tuple[Any, ...]  # the op's arguments before those of the step
    heads: int
    numbers: tuple[Any, ...]  # the op's arguments after those of the step
    sinks: Tensor | None


def prepare(layer: DecoderLayer) -> Any:
    """Prepared if one op can compute the whole layer; else the layer itself, which the reference composes."""
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
    assert isinstance(layer.mlp, GatedMlp)  # else `products` is empty
    gate = GATES[layer.mlp.gate]
    rotation = ROTATIONS[layer.rotation]
    numbers = (down.in_features, gate, rotation, layer.window, layer.eps, layer.offset, layer.scale, layer.soft_cap)
    sinks = None if layer.sinks is None else layer.sinks.float()
    return Prepared(layer, weights, out.in_features // layer.dim, numbers, sinks)


def _present(*norms: Tensor | None) -> list[Tensor]:
    return [norm for norm in norms if norm is not None]


def decoder(ops: Ops, layer: Any, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. The reference composes a step with adapters from smaller ops."""
    if not isinstance(layer, Prepared):
        return reference.decoder(ops, layer, x, stream, step)
    plain = layer.layer
    if step.adapters is not None:
        return reference.decoder(ops, plain, x, stream, step)
    rotation = step.rotations[plain.rotation_index]
    pages = step.cache.layers[plain.cache_index]
    rows = step.rows
    places = step.slots, *pages, rows.row_starts, rows.context_lens, rows.page_table
    _layer(x, stream, *layer.weights, *rotation, *places, layer.sinks, layer.heads, *layer.numbers)
    if step.answers is None:
        return x, stream
    tokens = step.answers.tokens  # the op has computed every token
    return x.index_select(0, tokens), stream.index_select(0, tokens)
