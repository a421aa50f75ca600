"""The MLP of a decoder layer. It computes each token independently of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from .projection import Projection
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops

Gate = Literal["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]  # names of the fields of Activation


class Mlp(Protocol):
    """The MLP of a decoder layer. Kernels that fuse a layer support only some implementations, such as GatedMlp."""

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """x [tokens, hidden], normalised -> [tokens, hidden]."""
        ...


class GatedMlp(NamedTuple):
    """down(gate(gate_up(x)))."""

    gate_up: Projection  # hidden -> 2 * inner, gates first
    down: Projection  # inner -> hidden
    gate: Gate

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        gated = getattr(ops.activation, self.gate)(self.gate_up(x, ops, step))
        return self.down(gated, ops, step)
