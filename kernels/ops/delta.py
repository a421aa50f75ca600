"""Gated DeltaNet as the mixer of a layer (Qwen3-Next, 2025): convolution, delta rule, gated norm, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .projection import Projection
from .scan import LayerStates
from .state import Conv, Delta, StateRows
from .step import HeadStep, LayerStep

if TYPE_CHECKING:
    from . import Ops


class DeltaScan(NamedTuple):
    """Convolution and delta rule of queries, keys and values. See scan.Scan."""

    layer: int
    width: int  # all values of a token
    weight: Tensor  # [conv width, channels], as in state.Conv
    rates: Tensor  # [value heads] float32, as in state.Delta
    dt_bias: Tensor  # [value heads] float32

    def __call__(self, inputs: tuple[Tensor, ...], ops: Ops, rows: StateRows, states: LayerStates) -> Tensor:
        """inputs: queries, keys and values [tokens, channels]; b and a [tokens, 2 * value heads]."""
        qkv, rates = inputs
        b, a = rates.chunk(2, dim=1)
        mixed = ops.state.conv(qkv, rows, Conv(self.weight, states.conv))
        return ops.state.gated_delta(mixed, a, b, rows, Delta(states.scan, self.rates, self.dt_bias)).flatten(1)


class DeltaMixer(NamedTuple):
    """See mixer.Mixer."""

    inputs: Projection  # hidden -> queries, keys, values, gates
    rates: Projection  # hidden -> b, a
    scan: DeltaScan
    norm: Tensor  # [value dim]
    out: Projection  # value heads * value dim -> hidden
    eps: float

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        channels = self.scan.weight.shape[1]
        qkv, gate = self.inputs(x, ops, step).split((channels, self.scan.width), dim=1)
        inputs = qkv, self.rates(x, ops, step)
        values = step.run_scan(self.scan, inputs, ops, step.state_rows, step.cache.states)
        heads = -1, len(self.norm)
        normed = ops.state.gated_norm(
            values.unflatten(1, heads), gate.unflatten(1, heads), self.norm, self.eps, "norm-gate"
        )
        return self.out(normed.flatten(1), ops, step)


class Reordered(NamedTuple):
    """A projection whose outputs are in another order in the files."""

    projection: Projection
    order: Tensor  # [out_features] int64: the index in the files of each output

    @property
    def product(self) -> None:
        return None

    def __call__(
        self, x: Tensor, ops: Ops, step: LayerStep | HeadStep | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self.projection(x, ops, step, dtype).index_select(1, self.order)
