"""Mamba2 as the mixer of a layer (Dao & Gu, 2024): convolution, scan, gated norm, output projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .projection import Projection
from .scan import LayerStates
from .state import Conv, Ssd, StateRows
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops


class MambaScan(NamedTuple):
    """Convolution and scan of x, B and C. See scan.Scan."""

    layer: int
    width: int  # all values of x of a token
    weight: Tensor  # [conv width, channels], as in state.Conv
    bias: Tensor | None  # [channels]
    rates: Tensor  # [heads] float32, as in state.Ssd
    dt_bias: Tensor  # [heads] float32
    skip: Tensor  # [heads] float32

    def __call__(self, inputs: tuple[Tensor, ...], ops: Ops, rows: StateRows, states: LayerStates) -> Tensor:
        """inputs: x, B and C [tokens, channels]; dt [tokens, heads]."""
        channels, dt = inputs
        mixed = ops.state.conv(channels, rows, Conv(self.weight, states.conv, self.bias))
        return ops.state.ssd(mixed, dt, rows, Ssd(states.scan, self.rates, self.dt_bias, self.skip)).flatten(1)


class MambaMixer(NamedTuple):
    """See mixer.Mixer."""

    inputs: Projection  # hidden -> gates, x, B, C, dt
    scan: MambaScan
    norm: Tensor  # [groups, values of a group]
    out: Projection  # heads * head dim -> hidden
    eps: float

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        sizes = self.scan.width, self.scan.weight.shape[1], len(self.scan.rates)
        gate, channels, dt = self.inputs(x, ops, step).split(sizes, dim=1)
        values = step.run_scan(self.scan, (channels, dt), ops, step.state_rows, step.cache.states)
        groups = self.norm.shape
        normed = ops.state.gated_norm(
            values.unflatten(1, groups), gate.unflatten(1, groups), self.norm, self.eps, "gate-norm"
        )
        return self.out(normed.flatten(1), ops, step)
