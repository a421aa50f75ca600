"""A decoder layer with fused norms and gates.

Products of a small batch compute the norm of their input in the prologue and the gate of their output in the epilogue.
Tiled products compute the norm or the gate of their input in the kernel that rounds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..elements.arguments import GATES
from ..ops import Ops
from ..ops import layer as reference
from ..ops.layer import DecoderLayer
from ..ops.mlp import Gate, GatedMlp
from ..ops.projection import Product, Projection
from ..ops.step import LayerStep
from .linear import FP8_ROUNDED, INT4_WIDE, Packed, can_fuse_input, can_fuse_norm, small_batch, tiled


def decoder(ops: Ops, layer: DecoderLayer, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. The reference computes steps with adapters or with `answers`, and layers whose norms or
    gate the kernels cannot fuse."""
    products = _fused_products(layer, x)
    if products is None or step.answers is not None or step.adapters is not None:
        return reference.decoder(ops, layer, x, stream, step)
    before = layer.before_attention, layer.eps, layer.offset
    qkv, stream = products.normalised(x, stream, before, products.qkv)
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
    x, stream = products.mlp(x, stream, before, ops, step)
    if layer.after_mlp is not None:
        x = ops.norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


Norm = tuple[Tensor, float, float]  # weight, eps, offset


class _SmallBatch(NamedTuple):
    """The products of a layer by small_batch."""

    qkv: Product
    gate_up: Product
    down: Projection
    gate: Gate

    def normalised(
        self, x: Tensor, stream: Tensor, norm: Norm, product: Product, gate: int = -1
    ) -> tuple[Tensor, Tensor]:
        """(product of norm(x + stream), x + stream)."""
        outputs: tuple[Tensor, Tensor] = small_batch(
            x.contiguous(), product.weight, product.bias, x.dtype, None, norm, stream.contiguous(), gate
        )
        return outputs

    def mlp(self, x: Tensor, stream: Tensor, norm: Norm, ops: Ops, step: LayerStep) -> tuple[Tensor, Tensor]:
        """(MLP of norm(x + stream), x + stream)."""
        gated, stream = self.normalised(x, stream, norm, self.gate_up, GATES[self.gate])
        return self.down(gated, ops, step), stream


class _Tiled(NamedTuple):
    """The products of a layer by the tiled kernels."""

    qkv: Product
    gate_up: Product
    down: Projection
    gate: Gate

    def normalised(self, x: Tensor, stream: Tensor, norm: Norm, product: Product) -> tuple[Tensor, Tensor]:
        """(product of norm(x + stream), x + stream)."""
        outputs: tuple[Tensor, Tensor] = tiled(
            x.contiguous(), product.weight, product.bias, x.dtype, _format(product), norm, stream.contiguous()
        )
        return outputs

    def mlp(self, x: Tensor, stream: Tensor, norm: Norm, ops: Ops, step: LayerStep) -> tuple[Tensor, Tensor]:
        """(MLP of norm(x + stream), x + stream)."""
        gate_up, stream = self.normalised(x, stream, norm, self.gate_up)
        down = _tiled_product(self.down, len(x))
        if down is None:
            return self.down(getattr(ops.activation, self.gate)(gate_up), ops, step), stream
        gate = GATES[self.gate]
        out: Tensor = tiled(gate_up, down.weight, down.bias, x.dtype, _format(down), input_gate=gate)
        return out, stream


def _fused_products(layer: DecoderLayer, x: Tensor) -> _SmallBatch | _Tiled | None:
    """The products of the layer; None if no kernel can fuse the norms."""
    mlp = layer.mlp
    if not isinstance(mlp, GatedMlp) or not x.is_cuda or x.dtype != torch.bfloat16:
        return None
    qkv = _tiled_product(layer.qkv, len(x), layer.before_attention)
    gate_up = _tiled_product(mlp.gate_up, len(x), layer.before_mlp)
    if qkv is not None and gate_up is not None:
        return _Tiled(qkv, gate_up, mlp.down, mlp.gate)
    qkv = _small_batch_product(layer.qkv, len(x))
    gate_up = _small_batch_product(mlp.gate_up, len(x), gated=True)
    if qkv is None or gate_up is None:
        return None
    return _SmallBatch(qkv, gate_up, mlp.down, mlp.gate)


def _small_batch_product(projection: Projection, rows: int, gated: bool = False) -> Product | None:
    """The product of the projection; None if small_batch cannot fuse the norm before it (and the gate after it)."""
    product = projection.product
    if product is None or product.order is not None or product.op == "int4_wide":
        return None
    fusable = can_fuse_norm(product.weight, rows, gated) and product.weight.out_features % 16 == 0
    return product if fusable else None


def _tiled_product(projection: Projection, rows: int, norm: Tensor | None = None) -> Product | None:
    """The product of the projection; None if the tiled kernels cannot fuse the norm or the gate before it."""
    product = projection.product
    if product is None or product.order is not None or product.op == "dense":
        return None
    if not isinstance(product.weight, Packed):
        return None
    return product if can_fuse_input(product.weight, rows, _format(product), norm) else None


def _format(product: Product) -> int:
    packed: Packed = product.weight
    if packed.rounds:
        return FP8_ROUNDED
    return INT4_WIDE if product.op == "int4_wide" else packed.format
