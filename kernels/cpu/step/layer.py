"""Computes a decoder layer in one call of layer.cpp, if all its weights are packed; kernels/ops/layer.py defines it. An
MLP that the call does not support is computed after it: a mixture of experts in a second call, if possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compiled.arguments import GATES, ROTATIONS
from ...ops import Ops
from ...ops import layer as reference
from ...ops.layer import DecoderLayer
from ...ops.lora import Adapted
from ...ops.mlp import Experts, GatedMlp
from ...ops.projection import Product, Projection
from ...ops.step import LayerStep
from ..lora.products import is_supported, tile_arguments
from ..moe.experts import Prepared as PreparedExperts
from ..moe.experts import prepare as prepare_experts
from ..moe.experts import routed_experts
from ..products.linear import Packed

_layer = torch.ops.localllm.layer.default

_NONE = torch.empty(0)


class LayerLora(NamedTuple):
    """The LoRA factors of the projections that the op computes."""

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
    has_mlp: bool  # whether the op computes the MLP and the norm after it
    experts: PreparedExperts | None  # the routed experts, which a second op computes; None: no op computes them


def prepare(layer: DecoderLayer) -> Any:
    """The layer as `Prepared` if one op can compute all of it, or all of it but the MLP. Otherwise the layer unchanged,
    for the reference."""
    if _are_supported(layer.products) and isinstance(layer.mlp, GatedMlp):
        mlp = layer.mlp
        lora = _lora(layer.qkv, layer.out, mlp.gate_up, mlp.down)
        return _prepared(layer, layer.products, GATES[mlp.gate], lora)
    if _are_supported(layer.attention_products):
        return _prepared(layer, layer.attention_products, 0, _lora(layer.qkv, layer.out))
    return layer


def _are_supported(products: Sequence[Product]) -> bool:
    """Whether one op can compute these products: all are packed, and int4 products are of one kind."""
    int4_ops = {product.op for product in products if product.op.startswith("int4")}
    return bool(products) and len(int4_ops) < 2 and all(isinstance(product.weight, Packed) for product in products)


def _prepared(layer: DecoderLayer, products: Sequence[Product], gate: int, lora: LayerLora | None) -> Prepared:
    """`products`: qkv and out, then gate_up and down if the op computes the MLP. `gate` is then its activation."""
    packed = [product.weight for product in products]
    weights = (
        _present(layer.before_attention, layer.before_mlp, layer.after_attention, layer.after_mlp),
        _present(layer.query_norm, layer.key_norm),
        [weight.data for weight in packed],
        [_NONE if product.bias is None else product.bias.float() for product in products],
        [weight.format for weight in packed],
        [weight.group for weight in packed],
        any(product.op == "int4_wide" for product in products),
    )
    inner = packed[-1].in_features  # of the MLP; not used without it
    rotation = ROTATIONS[layer.rotation]
    numbers = (inner, gate, rotation, layer.window, layer.eps, layer.offset, layer.scale, layer.soft_cap)
    sinks = None if layer.sinks is None else layer.sinks.float()
    heads = packed[1].in_features // layer.dim
    experts = prepare_experts(layer.mlp)
    return Prepared(layer, weights, heads, numbers, sinks, lora, len(products) == 4, experts)


def _lora(*projections: Projection) -> LayerLora | None:
    """The LoRA factors of the projections; None if one has none, or if no kernel supports them."""
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
    if adapters is None or step.query_factors is not None:
        return reference.decoder(ops, plain, x, stream, step)
    rotation = step.rotations[plain.rotation_index]
    pages = step.cache.layers[plain.cache_index]
    rows = step.rows
    places = step.slots, *pages, rows.row_starts, rows.context_lens, rows.page_table
    _layer(x, stream, *layer.weights, *rotation, *places, layer.sinks, layer.heads, *layer.numbers, *adapters)
    if step.sampled is not None:
        tokens = step.sampled.tokens  # select these tokens, because the op has computed all tokens
        x = x.index_select(0, tokens)
        stream = stream.index_select(0, tokens)
    if layer.has_mlp:
        return x, stream
    x = _mlp(ops, layer, x, step if step.sampled is None else step.only_sampled())
    if plain.after_mlp is not None:
        x = ops.norm.rms(x, plain.after_mlp, plain.eps, plain.offset)
    return x, stream


def _mlp(ops: Ops, layer: Prepared, x: Tensor, step: LayerStep) -> Tensor:
    mlp = layer.layer.mlp
    if layer.experts is None or step.adapters is not None:
        return mlp(x, ops, step)
    assert isinstance(mlp, Experts)
    result = routed_experts(x, layer.experts)
    return result if mlp.shared is None else result + mlp.shared_result(x, mlp.shared, ops, step)
