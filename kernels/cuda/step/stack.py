"""All layers of a decode step of one row in one kernel (step.cu). kernels/ops/layer.py has the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...compiled.arguments import GATES
from ...gpu.properties import gpu_properties
from ...ops import Ops
from ...ops import layer as reference
from ...ops.layer import DecoderLayer
from ...ops.mlp import GatedMlp
from ...ops.projection import Product
from ...ops.step import LayerStep
from ..products.linear import BF16, Packed

_step = torch.ops.localllm.decoder_step.default
_shared_bytes = torch.ops.localllm.decoder_step_shared_bytes.default

# Largest size of a layer's weights in bytes for which one kernel computes all layers. On H200 one kernel is faster for
# these sizes than kernels per layer; larger sizes are not measured.
MAX_LAYER_BYTES = 448 << 20


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
    shared_bytes: int = 0  # size of StepArgs::shared, the memory for exchange between thread blocks
    # StepArgs::shared of each stream; zeros before its first step
    shared: dict[int, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[DecoderLayer]:
        return iter(self.layers)

    def shared_on(self, device: torch.device) -> Tensor:
        """StepArgs::shared of the current stream, [shared_bytes] uint8. If a graph captures the first step of a stream,
        the graph contains the allocation and the memset."""
        stream = torch.cuda.current_stream(device).cuda_stream
        memory = self.shared.get(stream)
        if memory is None:
            memory = torch.zeros(self.shared_bytes, dtype=torch.uint8, device=device)
            if not torch.cuda.is_current_stream_capturing():
                self.shared[stream] = memory
        return memory


def prepare_stack(layers: Sequence[DecoderLayer]) -> Stack:
    """The layers of a model, prepared for one kernel if it supports them."""
    layers = tuple(layers)
    if not all(isinstance(layer, DecoderLayer) for layer in layers):
        return Stack(layers)
    shapes = {_shape(layer) for layer in layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if [layer.cache_index for layer in layers] != list(range(len(layers))):
        shape = None
    if shape is None or _bytes(layers[0]) > MAX_LAYER_BYTES:
        return Stack(layers)
    table = torch.tensor([_addresses(layer) for layer in layers], device=_device(layers[0]))
    shared_bytes = _shared_bytes(table, *shape[:5])
    if not shared_bytes:
        return Stack(layers)
    # Wait for the copy of the table: a step reads the table before it waits for earlier kernels.
    torch.cuda.current_stream(table.device).synchronize()
    return Stack(layers, shape, table, shared_bytes)


def decoders(ops: Ops, stack: Stack, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. One kernel computes a step of one token; other steps run layer by layer."""
    shape = stack.shape
    keys = step.cache.keys
    values = step.cache.values
    if shape is None or not isinstance(keys, Tensor) or not _fits(shape, x, step, keys):
        return reference.decoders(ops, stack, x, stream, step)
    x_out = torch.empty_like(x)
    stream_out = torch.empty_like(x)
    rows = step.rows
    tables = *step.rotations[0], step.slots, rows.context_lens, rows.page_table, keys, values
    numbers = shape.inner, shape.heads, GATES[shape.gate], shape.eps, shape.offset, shape.scale
    inputs = x.contiguous(), stream.contiguous()
    _step(x_out, stream_out, *inputs, stack.table, stack.shared_on(x.device), *tables, *numbers)
    return x_out, stream_out


def _fits(shape: Shape, x: Tensor, step: LayerStep, keys: Tensor) -> bool:
    """True if the kernel supports this step. False for a step without rows, as in a capture without attention."""
    if not step.is_plain:
        return False
    one_token = len(x) == len(step.rows.query_lens) == 1
    dtypes = x.dtype == keys.dtype == torch.bfloat16
    pages = keys.is_contiguous() and keys.shape[3:] == (shape.kv_heads, shape.dim)
    page_size = keys.shape[2]
    power_of_two = page_size & (page_size - 1) == 0
    rotation = [2 * cos.shape[1] for cos, _ in step.rotations] == [shape.dim]  # one rotation, of all dimensions
    return one_token and dtypes and pages and power_of_two and rotation


def _shape(layer: DecoderLayer) -> Shape | None:
    """The shape of a layer; None if the kernel does not support the layer."""
    mlp = layer.mlp
    if not isinstance(mlp, GatedMlp) or not layer.products or not _hopper(_device(layer)):
        return None
    if not all(map(_plain, layer.products)) or not _plain_layer(layer):
        return None
    qkv, out, gate_up, down = (product.weight for product in layer.products)
    dim = layer.dim
    heads = out.in_features // dim
    kv_heads = (qkv.out_features - out.in_features) // (2 * dim)
    numbers = layer.eps, layer.offset, layer.scale
    shape = Shape(qkv.in_features, down.in_features, heads, kv_heads, dim, mlp.gate, *numbers)
    return shape if gate_up.out_features == 2 * shape.inner and _supported(shape) else None


def _supported(shape: Shape) -> bool:
    if shape.dim not in (64, 128) or shape.kv_heads <= 0:
        return False
    aligned = shape.hidden % 128 == shape.inner % 64 == 0
    return aligned and shape.heads % shape.kv_heads == 0 and shape.heads <= 8 * shape.kv_heads


def _plain_layer(layer: DecoderLayer) -> bool:
    """True if the kernel supports the options of the layer and can read its norms."""
    without_options = not layer.window and not layer.soft_cap and layer.sinks is layer.after_attention is None
    norms = layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm
    readable = all(_aligned_bf16(norm) for norm in norms if norm is not None)
    return layer.rotation == "neox" and without_options and readable


def _plain(product: Product) -> bool:
    """True for a bf16 weight with no bias or a float32 bias."""
    weight = product.weight
    if not isinstance(weight, Packed) or weight.format != BF16 or not _aligned_bf16(weight.data):
        return False
    return product.bias is None or product.bias.dtype == torch.float32


def _aligned_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and gpu_properties(device).capability[0] == 9


def _device(layer: DecoderLayer) -> torch.device:
    """The device of a layer with a norm before its MLP."""
    assert layer.before_mlp is not None
    return layer.before_mlp.device


def _bytes(layer: DecoderLayer) -> int:
    return sum(product.weight.data.nbytes for product in layer.products)


def _addresses(layer: DecoderLayer) -> list[int]:
    """The addresses of a layer's tensors, in the order of the fields of StepLayer in step.h."""
    weights = [product.weight.data for product in layer.products]
    biases = [product.bias for product in layer.products]
    norms = layer.before_attention, layer.before_mlp, layer.query_norm, layer.key_norm
    return [0 if tensor is None else tensor.data_ptr() for tensor in (*weights, *biases, *norms)]
