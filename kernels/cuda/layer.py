"""A decoder layer of few tokens: norms are made on the way into the products after them, and gates on the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import Ops
from ..ops import layer as reference
from ..ops.attention import Rows
from ..ops.layer import DecoderLayer, Last
from ..ops.projection import Product
from .linear import few_rows, takes_norm

# The numbers of Activation in kernels.h.
GATES = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}


def decoder(
    ops: Ops,
    layer: DecoderLayer,
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
    """See kernels/ops/layer.py, whose parts it computes one by one where tokens are many or formats others."""
    qkv_product, gate_up = layer.qkv, layer.gate_up
    if last is not None or not (_fused(qkv_product, x) and _fused(gate_up, x, gated=True)):
        return reference.decoder(ops, layer, x, stream, cos, sin, rows, slots, key_pages, value_pages, last)
    before = layer.before_attention, layer.eps, layer.offset
    qkv, stream = _normalised(x, stream, before, qkv_product)
    head_norms = layer.query_norm, layer.key_norm, layer.eps, layer.offset
    heads = qkv.view(len(x), -1, layer.dim)
    query = ops.kv.append(heads, *head_norms, cos, sin, layer.rotation, slots, key_pages, value_pages)
    options = layer.scale, layer.window, layer.soft_cap, layer.sinks
    seen = ops.attention.paged(query, key_pages, value_pages, rows, *options)
    x = layer.out(seen.flatten(1), ops)
    if layer.after_attention is not None:
        x = ops.norm.rms(x, layer.after_attention, layer.eps, layer.offset)
    before = layer.before_mlp, layer.eps, layer.offset
    gated, stream = _normalised(x, stream, before, gate_up, GATES[layer.gate])
    x = layer.down(gated, ops)
    if layer.after_mlp is not None:
        x = ops.norm.rms(x, layer.after_mlp, layer.eps, layer.offset)
    return x, stream


def _fused(product: Any, x: Tensor, gated: bool = False) -> bool:
    if not isinstance(product, Product) or product.order is not None or product.op == "int4_wide":
        return False
    if not x.is_cuda or x.dtype != torch.bfloat16 or not takes_norm(product.weight, len(x), gated):
        return False
    outs: int = product.weight.outs
    return outs % 16 == 0


def _normalised(
    x: Tensor, stream: Tensor, norm: tuple[Tensor, float, float], product: Any, gate: int = -1
) -> tuple[Tensor, Tensor]:
    answer: tuple[Tensor, Tensor] = few_rows(
        x.contiguous(), product.weight, product.bias, x.dtype, None, norm, stream.contiguous(), gate
    )
    return answer
