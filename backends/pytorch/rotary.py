"""Tables of cosines and sines for rotary embeddings, with all scalings that config.json may name."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.files.rope import frequencies as rope_frequencies
from ...engine.files.rope_config import QueryScaling, Rope


class Rotary:
    """Tables of cos and sin for all positions below `context`, each [context, rotary_dim / 2] float32."""

    def __init__(self, rope: Rope, context: int, device: str) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies(rope, context))
        self._cos = (angles.cos() * rope.attention_factor).to(device)
        self._sin = (angles.sin() * rope.attention_factor).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for `positions` [tokens], each [tokens, rotary_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class NoRotation:
    """The rows of a layer without a rope: cos is 1 and sin is 0, so kernels return queries and keys unchanged."""

    def __init__(self, rope: Rope, device: str) -> None:
        """`rope`: the rope of other layers, for the shape of the rows."""
        half = rope.rotary_dim // 2
        self._cos = torch.ones(half, device=device)
        self._sin = torch.zeros(half, device=device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See Rotary.rows."""
        shape = positions.shape[0], self._cos.shape[0]  # len() would fix the number of tokens in a traced step
        return self._cos.expand(shape).contiguous(), self._sin.expand(shape).contiguous()


class QueryFactors:
    """The factors of the queries for all positions below `context`."""

    def __init__(self, scaling: QueryScaling, context: int, device: str, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the queries, to which the factors are rounded."""
        steps = (torch.arange(context) + scaling.offset).div(scaling.positions, rounding_mode="floor")
        self._factors = (1 + scaling.beta * torch.log1p(steps)).to(device, dtype).unsqueeze(1)
        self._positions = scaling.positions - scaling.offset

    def rows(self, positions: Tensor, contexts: tuple[int, ...]) -> Tensor | None:
        """The factors [tokens, 1] for `positions` [tokens]; None if all of them are 1. `contexts`: upper bounds of the
        lengths of the rows; empty if they are unknown, as in a capture without attention."""
        if contexts and max(contexts) <= self._positions:
            return None
        return self._factors.index_select(0, positions)


def frequencies(rope: Rope, context: int) -> Tensor:
    """The frequency of each dimension in radians per position, [rotary_dim / 2] float32. See engine.rope."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    radians: Tensor = rope_frequencies(rope, context, rope.theta**exponents, torch.tensor)
    return radians
