"""Loads the weights of an MLP into the L2 cache while attention computes, which reads other memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.ops import Ops
from ...kernels.ops.layer import DecoderLayer, Layer
from ...kernels.ops.linear import weight_tensors
from ...kernels.ops.mlp import GatedMlp
from ...kernels.ops.step import LayerStep
from ...kernels.ops.streams import Streams

LIMIT = 2**26  # bytes for a layer; more than the cache holds would evict the first weights


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Decoder layers that prefetch on the second stream of `streams`. A layer waits for its own prefetch, so a captured
    step joins both streams."""

    layer: Layer
    streams: Streams
    limit: int

    def decoder(
        self, ops: Ops, layer: DecoderLayer, x: Tensor, stream: Tensor, step: LayerStep
    ) -> tuple[Tensor, Tensor]:
        """See layer.decoder."""
        parts = list(within(_weights(layer), self.limit))
        if not parts:
            return self.layer.decoder(ops, layer, x, stream, step)
        with self.streams.fork():
            for weight, size in parts:
                torch.ops.npu.npu_prefetch(weight, x, size, 0)
        result = self.layer.decoder(ops, layer, x, stream, step)
        self.streams.join()
        return result


def within(weights: Iterator[Tensor], limit: int) -> Iterator[tuple[Tensor, int]]:
    """The first `limit` bytes of the weights: (weight, bytes of it)."""
    for weight in weights:
        size = min(limit, weight.nbytes)
        limit -= size
        if size:
            yield weight, size


def _weights(layer: DecoderLayer) -> Iterator[Tensor]:
    """The weights of a gated MLP, in the order of their use. Those of experts depend on the tokens."""
    if not isinstance(layer.mlp, GatedMlp):
        return
    for projection in (layer.mlp.gate_up, layer.mlp.down):
        if projection.product is not None:
            yield from weight_tensors(projection.product.weight)


def with_prefetch(ops: Ops, streams: Streams, limit: int = LIMIT) -> Ops:
    """The ops of a device, whose layers prefetch. Off unless a developer option turns it on: nobody has measured it."""
    return replace(ops, layer=replace(ops.layer, decoder=Prefetch(ops.layer, streams, limit).decoder))
