"""A decoder layer whose token mixer is no attention over a paged cache: norm, mixer, norm, MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .mlp import Mlp
from .step import LayerStep

if TYPE_CHECKING:
    from . import Ops


class Mixer(Protocol):
    """Combines the tokens of a row. Its parts that depend on the rows are run with `step.run_scan`."""

    def __call__(self, x: Tensor, ops: Ops, step: LayerStep) -> Tensor:
        """x [tokens, hidden], normalised -> [tokens, hidden]. Writes the states of the step's rows."""
        ...


@dataclass(frozen=True, slots=True)
class MixerLayer:
    """The weights and options of the layer. Norm weights are [hidden]."""

    before_mixer: Tensor
    before_mlp: Tensor
    mixer: Mixer
    mlp: Mlp
    eps: float
    offset: float  # added to the norm weights

    def __call__(self, ops: Ops, x: Tensor, stream: Tensor, step: LayerStep) -> tuple[Tensor, Tensor]:
        """As the op `layer.decoder`. With step.sampled the mixer computes all tokens, because later tokens of a row
        read them."""
        x, stream = ops.norm.add_rms(x, stream, self.before_mixer, self.eps, self.offset)
        sampled = step.sampled
        x = self.mixer(x, ops, step if sampled is None else step._replace(sampled=None))
        if sampled is not None:
            x = x.index_select(0, sampled.tokens)
            stream = stream.index_select(0, sampled.tokens)
            if not len(x):
                return x, stream
            step = step.only_sampled()
        x, stream = ops.norm.add_rms(x, stream, self.before_mlp, self.eps, self.offset)
        return self.mlp(x, ops, step), stream
