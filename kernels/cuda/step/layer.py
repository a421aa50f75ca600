"""A decoder layer for a small batch.

The product after a norm computes the norm in its prologue; the product before a gate computes the gate in its epilogue.
The router of a mixture of experts computes the norm before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compiled.arguments import GATES
from ...ops import Ops
from ...ops import layer as reference
from ...ops.layer import DecoderLayer
from ...ops.mlp import Experts, GatedMlp
from ...ops.projection import Product, Projection
from ...ops.step import LayerStep
from ..moe.experts import norm_route
from ..products.linear import can_fuse_norm, format_of, small_batch


def decoder(ops: Ops, layer: DecoderLayer, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. The reference computes steps with many tokens, with adapters, with `sampled` or with
    query factors, and layers whose norms or gate the kernel cannot fuse."""
    mlp = layer.mlp
    qkv = _qkv(layer, x)
    gate_up = _fused(mlp.gate_up, len(x), gated=True) if isinstance(mlp, GatedMlp) else None
    is_fused = gate_up is not None or isinstance(mlp, Experts)
    if qkv is None or not is_fused or not step.is_plain:
        return reference.decoder(ops, layer, x, stream, step)
    x, stream = _attention(ops, layer, qkv, x, stream, step)
    before = layer.before_mlp, layer.eps, layer.offset
    if isinstance(mlp, Experts):
        x, stream = _experts(ops, mlp, x, stream, before, step)
    else:
        assert isinstance(mlp, GatedMlp)
        assert gate_up is not None
        gated, stream = _normalised(x, stream, before, gate_up, GATES[mlp.gate])
        x = mlp.down(gated, ops, step)
    if layer.after_mlp is not None:
        x = ops.norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


def _attention(
    ops: Ops, layer: DecoderLayer, product: Product, x: Tensor, stream: Tensor, step: LayerStep
) -> tuple[Tensor, Tensor]:
    """The output of the layer's attention, and the residual stream before it. `product`: qkv."""
    before = layer.before_attention, layer.eps, layer.offset
    qkv, stream = _normalised(x, stream, before, product)
    heads = qkv.view(len(x), -1, layer.dim)
    query = ops.kv.append(heads, *step.rotations[layer.rotation_index], step.slots, layer.append(step))
    attention = ops.attention.paged(query, step.rows, layer.attend(step))
    x = layer.out(attention.flatten(1), ops, step)
    if layer.after_attention is not None:
        x = ops.norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    return x, stream


def _experts(
    ops: Ops, mlp: Experts, x: Tensor, stream: Tensor, norm: tuple[Tensor | None, float, float], step: LayerStep
) -> tuple[Tensor, Tensor]:
    """(the experts' output for norm(x + stream), x + stream). With a fused router, the shared expert always forks after
    the router."""
    fused = norm_route(x, stream, norm, mlp)
    if fused is not None:
        x, stream, routed = fused
        return mlp.with_choices(x, routed, ops, step), stream
    weight, eps, offset = norm
    x, stream = ops.norm.add_rms(x, stream, weight, eps, offset)
    return mlp(x, ops, step), stream


def _qkv(layer: DecoderLayer, x: Tensor) -> Product | None:
    """The product qkv; None if the kernel cannot fuse the norm before it, or the attention of the layer."""
    if not layer.is_fusable or not x.is_cuda or x.dtype != torch.bfloat16:
        return None
    return _fused(layer.qkv, len(x))


def _fused(projection: Projection, rows: int, gated: bool = False) -> Product | None:
    """The product of the projection; None if the kernel cannot fuse the norm before it (and the gate after it)."""
    product = projection.product
    if product is None or product.order is not None:
        return None
    fusable = can_fuse_norm(product.op, product.weight, rows, gated) and product.weight.out_features % 16 == 0
    return product if fusable else None


def _normalised(
    x: Tensor, stream: Tensor, norm: tuple[Tensor | None, float, float], product: Product, gate: int = -1
) -> tuple[Tensor, Tensor]:
    """(product of norm(x + stream), x + stream)."""
    weight, eps, offset = norm
    assert weight is not None
    fused_norm = weight, eps, offset
    factors = product.weight, product.bias, x.dtype, format_of(product.op, product.weight)
    outputs: tuple[Tensor, Tensor] = small_batch(x.contiguous(), *factors, fused_norm, stream.contiguous(), gate)
    return outputs
