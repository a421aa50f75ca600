"""A decoder layer for few tokens: norms are fused into the prologue of the next product, gates into its epilogue."""

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
    """See kernels/ops/layer.py. The reference computes the layer for many tokens, unsupported formats, adapters and
    selected outputs."""
    qkv_product = _fused(layer.qkv, x)
    mlp = layer.mlp
    gate_up = _fused(mlp.gate_up, x, gated=True) if isinstance(mlp, GatedMlp) else None
    if step.answers is not None or step.adapters is not None or qkv_product is None or gate_up is None:
        return reference.decoder(ops, layer, x, stream, step)
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


def _fused(projection: Projection, x: Tensor, gated: bool = False) -> Product | None:
    """The projection's product if the kernel can fuse its norm (and its gate), else None."""
    product = projection.product
    if product is None or product.order is not None or product.op == "int4_wide":
        return None
    if not x.is_cuda or x.dtype != torch.bfloat16 or not can_fuse_norm(product.weight, len(x), gated):
        return None
    out_features: int = product.weight.out_features
    return product if out_features % 16 == 0 else None


def _normalised(
    x: Tensor, stream: Tensor, norm: tuple[Tensor, float, float], product: Product, gate: int = -1
) -> tuple[Tensor, Tensor]:
    answer: tuple[Tensor, Tensor] = small_batch(
        x.contiguous(), product.weight, product.bias, x.dtype, None, norm, stream.contiguous(), gate
    )
    return answer
