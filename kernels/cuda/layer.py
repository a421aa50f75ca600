"""A decoder layer for a small batch.

The product after a norm computes the norm in its prologue; the product before a gate computes the gate in its epilogue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elements.arguments import GATES
from ..ops import Ops
from ..ops import layer as reference
from ..ops.layer import DecoderLayer
from ..ops.mlp import GatedMlp
from ..ops.projection import Product, Projection
from ..ops.step import LayerStep
from .linear import can_fuse_norm, small_batch


def decoder(ops: Ops, layer: DecoderLayer, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. The reference computes steps with many tokens, with adapters, with `answers` or with
    query factors, and layers whose norms or gate the kernel cannot fuse."""
    mlp = layer.mlp
    products = _fused_products(layer, x)
    if products is None or not step.is_plain:
        return reference.decoder(ops, layer, x, stream, step)
    qkv_product, gate_up = products
    assert isinstance(mlp, GatedMlp)
    before = layer.before_attention, layer.eps, layer.offset
    qkv, stream = _normalised(x, stream, before, qkv_product)
    head_norms = layer.query_norm, layer.key_norm, layer.eps, layer.offset
    heads = qkv.view(len(x), -1, layer.dim)
    rotation = *step.rotations[layer.rotation_index], layer.rotation
    pages = step.cache.layers[layer.cache_index]
    query = ops.kv.append(heads, *head_norms, *rotation, step.slots, *pages)
    options = layer.scale, layer.window, layer.soft_cap, layer.sinks
    attention = ops.attention.paged(query, *pages, step.rows, *options)
    x = layer.out(attention.flatten(1), ops, step)
    if layer.after_attention is not None:
        x = ops.norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    before = layer.before_mlp, layer.eps, layer.offset
    gated, stream = _normalised(x, stream, before, gate_up, GATES[mlp.gate])
    x = mlp.down(gated, ops, step)
    if layer.after_mlp is not None:
        x = ops.norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


def _fused_products(layer: DecoderLayer, x: Tensor) -> tuple[Product, Product] | None:
    """The products qkv and gate_up; None if the kernel cannot fuse their norms and the gate."""
    mlp = layer.mlp
    if not isinstance(mlp, GatedMlp) or not layer.has_fusable_norms:
        return None
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return None
    qkv = _fused(layer.qkv, len(x))
    gate_up = _fused(mlp.gate_up, len(x), gated=True)
    return None if qkv is None or gate_up is None else (qkv, gate_up)


def _fused(projection: Projection, rows: int, gated: bool = False) -> Product | None:
    """The product of the projection; None if the kernel cannot fuse the norm before it (and the gate after it)."""
    product = projection.product
    if product is None or product.order is not None or product.op == "int4_wide":
        return None
    fusable = can_fuse_norm(product.weight, rows, gated) and product.weight.out_features % 16 == 0
    return product if fusable else None


def _normalised(
    x: Tensor, stream: Tensor, norm: tuple[Tensor | None, float, float], product: Product, gate: int = -1
) -> tuple[Tensor, Tensor]:
    """(product of norm(x + stream), x + stream)."""
    weight, eps, offset = norm
    assert weight is not None
    fused_norm = weight, eps, offset
    outputs: tuple[Tensor, Tensor] = small_batch(
        x.contiguous(), product.weight, product.bias, x.dtype, None, fused_norm, stream.contiguous(), gate
    )
    return outputs
