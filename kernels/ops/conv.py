"""A short convolution with gates as the mixer of a layer (LFM2, 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .projection import Projection
from .scan import LayerStates
from .state import Conv, StateRows
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops


class ConvScan(NamedTuple):
    """The convolution. See scan.Scan."""

    layer: int
    width: int  # channels
    weight: Tensor  # [conv width, channels], as in state.Conv
    bias: Tensor | None  # [channels]

    def __call__(self, inputs: tuple[Tensor, ...], ops: Ops, rows: StateRows, states: LayerStates) -> Tensor:
        """inputs: the gates before and after the convolution, and its values [tokens, 3 * channels]."""
        [x] = inputs
        return ops.state.short_conv(x, rows, Conv(self.weight, states.conv, self.bias))


class ConvMixer(NamedTuple):
    """See mixer.Mixer."""

    inputs: Projection  # hidden -> 3 * channels
    scan: ConvScan
    out: Projection  # channels -> hidden

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        inputs = (self.inputs(x, ops, step),)
        return self.out(step.run_scan(self.scan, inputs, ops, step.state_rows, step.cache.states), ops, step)
