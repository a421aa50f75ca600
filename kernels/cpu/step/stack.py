"""All layers of a step in one call of the library, because a call from Python takes about as long as a small product.
Steps with adapters, with `sampled` or with query factors call the library for each layer, as do models with layers that
the op does not support. kernels/ops/layer.py defines the op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops import Ops
from ...ops import layer as reference
from ...ops.mlp import Experts
from ...ops.step import LayerStep
from ..moe.experts import Prepared as PreparedExperts
from .layer import Prepared

_layers = torch.ops.localllm.layers.default


class Arguments(NamedTuple):
    """The arguments of the op `layers` that are the same in every step, layer by layer in the order in which
    stack.cpp reads them."""

    tensors: list[Tensor]
    numbers: Tensor  # int64; a list would be converted in every call
    reals: Tensor  # float64


@dataclass(frozen=True)
class Stack:
    """The prepared layers of a model."""

    layers: tuple[Any, ...]
    arguments: Arguments | None  # None: one op does not support all layers

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)


def prepare_stack(layers: Sequence[Any]) -> Stack:
    """The layers of a model, after `layer.prepare`."""
    layers = tuple(layers)
    if not all(isinstance(layer, Prepared) and _is_supported(layer) for layer in layers):
        return Stack(layers, None)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    reals: list[float] = []
    for layer in layers:
        _add_layer(layer, tensors, numbers, reals)
        numbers.append(layer.experts is not None)
        if layer.experts is not None:
            _add_experts(layer.experts, tensors, numbers, reals)
    integers = torch.tensor(numbers, dtype=torch.int64)
    return Stack(layers, Arguments(tensors, integers, torch.tensor(reals, dtype=torch.float64)))


def _is_supported(layer: Prepared) -> bool:
    """True if the op computes all of the layer."""
    mlp = layer.layer.mlp
    if layer.has_mlp:
        return True
    has_experts_only = isinstance(mlp, Experts) and mlp.shared is None and layer.layer.after_mlp is None
    return layer.experts is not None and has_experts_only


def _add_layer(layer: Prepared, tensors: list[Tensor], numbers: list[int], reals: list[float]) -> None:
    plain = layer.layer
    norms, head_norms, weights, biases, formats, groups, wide = layer.weights
    inner, gate, rotation, window, eps, offset, scale, soft_cap = layer.numbers
    tensors += [*norms, *head_norms, *weights, *biases]
    numbers += [len(norms), len(head_norms), len(weights), *formats, *groups, wide]
    numbers += [plain.rotation_index, plain.cache_index, layer.heads, inner, gate, rotation, window]
    reals += [eps, offset, scale, soft_cap]
    _add_optional(layer.sinks, tensors, numbers)


def _add_experts(prepared: PreparedExperts, tensors: list[Tensor], numbers: list[int], reals: list[float]) -> None:
    router, experts = prepared
    score, renormalise, scale, groups, top_groups, top2 = router.routing
    tensors += [router.weight, experts.gate_up, experts.down]
    reals.append(scale)
    numbers += [router.format, router.group, score, renormalise, groups, top_groups, top2, router.top_k]
    numbers += [experts.format, experts.gate_up_group, experts.down_group, experts.wide]
    numbers += [experts.experts, experts.inner, experts.gate]
    for tensor in (router.bias, router.correction, experts.gate_up_bias, experts.down_bias):
        _add_optional(tensor, tensors, numbers)


def _add_optional(tensor: Tensor | None, tensors: list[Tensor], numbers: list[int]) -> None:
    numbers.append(tensor is not None)
    if tensor is not None:
        tensors.append(tensor)


def decoders(ops: Ops, stack: Stack, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
    """See kernels/ops/layer.py. Overwrites x and stream."""
    arguments = stack.arguments
    if arguments is None or not step.is_plain:
        return reference.decoders(ops, stack, x, stream, step)
    cosines, sines = zip(*step.rotations, strict=True)
    keys, values = zip(*step.cache.layers, strict=True)
    rows = step.rows
    places = [(step.slots, rows.page_table), *((other.slots, other.rows.page_table) for other in step.other_places)]
    slots, tables = zip(*(places[group] for group in step.cache.groups or (0,)), strict=True)
    _layers(x, stream, *arguments, cosines, sines, slots, keys, values, rows.row_starts, rows.context_lens, tables)
    return x, stream
