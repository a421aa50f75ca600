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
from ..ops.projection import Product
from ..ops.step import LayerStep
from .linear import Packed

_layer = torch.ops.localllm.layer.default

_NONE = torch.empty(0)


class Prepared(NamedTuple):
    """A layer, and the arguments of its op that are the same in every step."""

    layer: DecoderLayer
    weights: tuple[Any, ...]  # arguments before those of the step
    heads: int
    numbers: tuple[Any, ...]  # arguments after those of the step
    sinks: Tensor | None


def prepare(layer: DecoderLayer) -> Any:
    """Prepared if one op can compute the whole layer; else the layer itself, which the reference composes."""
    packed = _packed(layer)
    quarter = {product.op for product in packed if product.op.startswith("int4")}
    if len(packed) < 4 or any(product.order is not None for product in packed) or len(quarter) > 1:
        return layer
    after = [layer.after_attention, layer.after_mlp] if layer.after_attention is not None else []
    head_norms = [layer.query_norm, layer.key_norm] if layer.query_norm is not None else []
    weights = (
        [layer.before_attention, layer.before_mlp, *after],
        head_norms,
        [product.weight.data for product in packed],
        [_NONE if product.bias is None else product.bias.float() for product in packed],
        [product.weight.format for product in packed],
        [product.weight.group for product in packed],
        quarter == {"int4_wide"},
    )
    assert isinstance(layer.mlp, GatedMlp)
    gate = GATES[layer.mlp.gate]
    rotation = ROTATIONS[layer.rotation]
    inner = packed[3].weight.in_features
    numbers = (inner, gate, rotation, layer.window, layer.eps, layer.offset, layer.scale, layer.soft_cap)
    sinks = None if layer.sinks is None else layer.sinks.float()
    return Prepared(layer, weights, packed[1].weight.in_features // layer.dim, numbers, sinks)


def _packed(layer: DecoderLayer) -> list[Product]:
    """The products qkv, out, gate_up and down that are single products with packed weights; empty for another MLP."""
    if not isinstance(layer.mlp, GatedMlp):
        return []
    projections = layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down
    products = [projection.product for projection in projections]
    return [product for product in products if product is not None and isinstance(product.weight, Packed)]


def decoder(ops: Ops, layer: Any, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """As kernels/ops/layer.py defines it. The reference composes a step with adapters from smaller ops."""
    if not isinstance(layer, Prepared):
        return reference.decoder(ops, layer, x, stream, step)
    plain, weights, heads, numbers, sinks = layer
    if step.adapters is not None:
        return reference.decoder(ops, plain, x, stream, step)
    rotation = step.rotations[plain.rotation_index]
    pages = step.cache.layers[plain.cache_index]
    rows = step.rows
    places = step.slots, *pages, rows.row_starts, rows.context_lens, rows.page_table
    _layer(x, stream, *weights, *rotation, *places, sinks, heads, *numbers)
    if step.answers is not None:  # the op computes every token
        tokens = step.answers.tokens
        return x.index_select(0, tokens), stream.index_select(0, tokens)
    return x, stream
