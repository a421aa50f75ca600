"""Tables of cosines and sines for rotary embeddings, with all scalings that config.json may name."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.modelconfig import Rope
from ...engine.rope import frequencies as rope_frequencies


class Rotary:
    """Tables of cos and sin for all positions below `context`, each [context, rotary_dim / 2] float32."""

    def __init__(self, rope: Rope, context: int, device: str) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies(rope, context))
        self._cos = (angles.cos() * rope.attention_factor).to(device)
        self._sin = (angles.sin() * rope.attention_factor).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for `positions` [tokens], each [tokens, rotary_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def frequencies(rope: Rope, context: int) -> Tensor:
    """The frequency of each dimension in radians per position, [rotary_dim / 2] float32. See engine.rope."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    radians: Tensor = rope_frequencies(rope, context, rope.theta**exponents, torch.tensor)
    return radians
