"""All layers of a decode step of one row in one kernel (step.cu). kernels/ops/layer.py has the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..elements.arguments import GATES
from ..ops import Ops
from ..ops import layer as reference
from ..ops.layer import DecoderLayer
from ..ops.mlp import GatedMlp
from ..ops.projection import Product
from ..ops.step import LayerStep
from .linear import BF16, Packed

_step = torch.ops.localllm.decoder_step.default
_shared_bytes = torch.ops.localllm.decoder_step_shared_bytes.default

# Limit of the bytes of a layer's weights. Up to this size one kernel for all layers is faster than kernels per layer on
# H200; larger layers are not measured.
CHOSEN_BYTES = 448 << 20


class Shape(NamedTuple):
    """The properties that all layers of a model must share."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    gate: str
    eps: float
    offset: float
    scale: float


@dataclass(frozen=True)
class Stack:
    """The layers of a model. If one kernel computes them all, `shape` and the fields after it are set."""

    layers: tuple[DecoderLayer, ...]
    shape: Shape | None = None
    table: Tensor | None = None  # [layers, fields] int64: the addresses of StepLayer in step.h
    room: int = 0  # bytes of StepArgs::shared, the memory for exchange between thread blocks
    shared: dict[int, Tensor] = field(default_factory=dict)  # this memory by stream; zeros before the first step

    def __iter__(self) -> Iterator[DecoderLayer]:
        return iter(self.layers)

    def shared_on(self, device: torch.device) -> Tensor:
        """[room] uint8 of the current stream. In a capture on a stream without an earlier step, the graph contains the
        allocation and the memset."""
        stream = torch.cuda.current_stream(device).cuda_stream
        memory = self.shared.get(stream)
        if memory is None:
            memory = torch.zeros(self.room, dtype=torch.uint8, device=device)
            if not torch.cuda.is_current_stream_capturing():
                self.shared[stream] = memory
        return memory


def prepare_stack(layers: Sequence[DecoderLayer]) -> Stack:
    """Prepares the layers for one kernel if it supports them."""
    layers = tuple(layers)
    shapes = {_shape(layer) for layer in layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if [layer.cache_index for layer in layers] != list(range(len(layers))):
        shape = None
    if shape is None or _bytes(layers[0]) > CHOSEN_BYTES:
        return Stack(layers)
    table = torch.tensor([_addresses(layer) for layer in layers], device=layers[0].before_mlp.device)
    room = _shared_bytes(table, *shape[:5])
    if not room:
        return Stack(layers)
    torch.cuda.current_stream(table.device).synchronize()  # steps read the table before they wait for earlier kernels
    return Stack(layers, shape, table, room)


def decoders(ops: Ops, stack: Stack, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. One kernel for a batch of one token, else one layer at a time."""
    shape = stack.shape
    keys = step.cache.keys
    values = step.cache.values
    if shape is None or not isinstance(keys, Tensor) or not _fits(shape, x, step, keys):
        return reference.decoders(ops, stack, x, stream, step)
    x_out = torch.empty_like(x)
    stream_out = torch.empty_like(x)
    rows = step.rows
    where = *step.rotations[0], step.slots, rows.context_lens, rows.page_table, keys, values
    numbers = shape.inner, shape.heads, GATES[shape.gate], shape.eps, shape.offset, shape.scale
    _step(
        x_out, stream_out, x.contiguous(), stream.contiguous(), stack.table, stack.shared_on(x.device), *where, *numbers
    )
    return x_out, stream_out


def _fits(shape: Shape, x: Tensor, step: LayerStep, keys: Tensor) -> bool:
    """True if the kernel supports this step. False without rows (a capture without attention)."""
    page_size = keys.shape[2]
    return (
        step.answers is None
        and step.adapters is None
        and len(x) == 1 == len(step.rows.query_lens)
        and x.dtype == keys.dtype == torch.bfloat16
        and keys.shape[3:] == (shape.kv_heads, shape.dim)
        and page_size & (page_size - 1) == 0
        and keys.is_contiguous()
        and len(step.rotations) == 1
        and 2 * step.rotations[0][0].shape[1] == shape.dim
    )


def _shape(layer: DecoderLayer) -> Shape | None:
    """The shape of a layer, or None if the kernel does not support the layer."""
    products = _plain_products(layer)
    mlp = layer.mlp
    if len(products) < 4 or not isinstance(mlp, GatedMlp) or not _hopper(layer.before_mlp.device):
        return None
    norms = layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm
    qkv, out, gate_up, down = (product.weight for product in products)
    dim = layer.dim
    heads = out.in_features // dim
    kv_heads = (qkv.out_features - out.in_features) // (2 * dim)
    supported = (
        dim in (64, 128)
        and qkv.in_features % 128 == down.in_features % 64 == 0
        and kv_heads > 0
        and heads % kv_heads == 0
        and heads <= 8 * kv_heads
        and gate_up.out_features == 2 * down.in_features
        and layer.rotation == "neox"
        and not (layer.window or layer.soft_cap)
        and layer.after_attention is layer.sinks is None
        and all(norm is None or _aligned_bf16(norm) for norm in norms)
    )
    if not supported:
        return None
    return Shape(
        qkv.in_features, down.in_features, heads, kv_heads, dim, mlp.gate, layer.eps, layer.offset, layer.scale
    )


def _plain_products(layer: DecoderLayer) -> list[Product]:
    """Those of the products qkv, out, gate_up and down whose weights are plain bf16."""
    if not isinstance(layer.mlp, GatedMlp):
        return []
    projections = layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down
    products = [projection.product for projection in projections]
    return [product for product in products if product is not None and _plain(product)]


def _plain(product: Product) -> bool:
    weight = product.weight
    bias = product.bias
    if product.order is not None or not isinstance(weight, Packed) or weight.format != BF16:
        return False
    return _aligned_bf16(weight.data) and (bias is None or bias.dtype == torch.float32)


def _aligned_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _bytes(layer: DecoderLayer) -> int:
    return sum(product.weight.data.nbytes for product in _plain_products(layer))


def _addresses(layer: DecoderLayer) -> list[int]:
    """The fields of StepLayer in step.h."""
    products = _plain_products(layer)
    norms = layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm
    tensors = (*(product.weight.data for product in products), *(product.bias for product in products), *norms)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
