"""The part of a recurrent layer that reads and writes states: its convolution and its recurrence (state.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from .state import StateRows

if TYPE_CHECKING:
    from . import Ops


class LayerStates(NamedTuple):
    """The states of one layer, for all slots and snapshots."""

    conv: Tensor  # [slots, width - 1, channels] float32, as in state.Conv
    scan: Tensor  # [slots, heads, key dim, value dim] float32, as in state.Delta and state.Ssd; of size 0 without these


class Scan(Protocol):
    """Like attention, this part depends on the rows of a step. So graphs of steps with several tokens in a row do not
    capture it."""

    @property
    def layer(self) -> int:
        """The index of the layer in Cache.states."""
        ...

    @property
    def width(self) -> int:
        """Number of outputs of a token."""
        ...

    def __call__(self, inputs: tuple[Tensor, ...], ops: Ops, rows: StateRows, states: LayerStates) -> Tensor:
        """inputs, each [tokens, …] -> [tokens, width], of the dtype of the first input. Writes the states of the
        rows."""
        ...


# Runs a scan. The rows are None in a trace.
RunScan = Callable[[Scan, tuple[Tensor, ...], "Ops", StateRows | None, tuple[LayerStates, ...]], Tensor]


def run_scan(
    scan: Scan, inputs: tuple[Tensor, ...], ops: Ops, rows: StateRows | None, states: tuple[LayerStates, ...]
) -> Tensor:
    """The result [tokens, width] of the scan. `states`: those of all layers."""
    assert rows is not None
    return scan(inputs, ops, rows, states[scan.layer])
