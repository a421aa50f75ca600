"""A decoder layer in one call of layer.cpp, where all its weights are packed; see kernels/ops/layer.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import Ops
from ..ops import layer as reference
from ..ops.attention import Rows
from ..ops.layer import DecoderLayer, Last
from ..ops.projection import Product
from .linear import Packed

_layer = torch.ops.localllm.layer.default

# The numbers of Activation and Rotation in kernels.h.
_GATES = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}
_ROTATIONS = {"neox": 0, "interleaved": 1}
_NONE = torch.empty(0)


class Prepared(NamedTuple):
    """The arguments of the op that stay the same, before and after those of the step."""

    weights: tuple[Any, ...]
    heads: int
    numbers: tuple[Any, ...]
    sinks: Tensor | None


def prepare(layer: DecoderLayer) -> Any:
    """What the op can take of one go; any other layer stays as it is, and is computed part by part."""
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    packed = [product for product in products if isinstance(product, Product) and isinstance(product.weight, Packed)]
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
    out, down = packed[1].weight, packed[3].weight
    gate, rotation = _GATES[layer.gate], _ROTATIONS[layer.rotation]
    numbers = (down.ins, gate, rotation, layer.window, layer.eps, layer.offset, layer.scale, layer.soft_cap)
    sinks = None if layer.sinks is None else layer.sinks.float()
    return Prepared(weights, out.ins // layer.dim, numbers, sinks)


def decoder(
    ops: Ops,
    layer: Any,
    x: Tensor,
    stream: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Rows,
    slots: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    last: Last | None = None,
) -> tuple[Tensor, Tensor]:
    if not isinstance(layer, Prepared):
        return reference.decoder(ops, layer, x, stream, cos, sin, rows, slots, key_pages, value_pages, last)
    weights, heads, numbers, sinks = layer
    step = slots, key_pages, value_pages, rows.row_starts, rows.context_lens, rows.page_table
    _layer(x, stream, *weights, cos, sin, *step, sinks, heads, *numbers)
    if last is not None:  # one call makes them all
        return x.index_select(0, last.tokens), stream.index_select(0, last.tokens)
    return x, stream
