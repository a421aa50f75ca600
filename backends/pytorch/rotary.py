"""Tables of cosines and sines for rotary embeddings, with every scaling of config.json."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...engine.modelconfig import Rope


class Rotary:
    """cos and sin of every position below `context`, float32, [context, rotary_dim / 2]."""

    def __init__(self, rope: Rope, context: int, device: str) -> None:
        angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies(rope, context))
        self._cos = (angles.cos() * rope.attention_factor).to(device)
        self._sin = (angles.sin() * rope.attention_factor).to(device)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [tokens]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def frequencies(rope: Rope, context: int) -> Tensor:
    """[rotary_dim / 2] radians per position, float32.

    LongRoPE has factors for short and for long texts. A change of factors would make cached keys wrong. So `context`,
    the configured maximum, decides once: long factors if it exceeds the context length of the original training.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factors if context > rope.original_positions else rope.short_factors
        return 1.0 / (torch.tensor(factors) * rope.theta**exponents)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divides low frequencies by the factor, keeps high ones and blends those between (Llama 3.1)."""
    periods = rope.original_positions * plain / (2 * math.pi)  # rotations over the original context
    share = ((periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain / rope.factor * (1 - share) + plain * share


def _yarn(rope: Rope, plain: Tensor) -> Tensor:
    """Divides the low frequencies by the factor, with a linear ramp over dimensions (Peng et al., 2023)."""

    def dimension(periods: float) -> float:
        """The dimension that rotates `periods` times over the original context."""
        return (
            rope.rotary_dim * math.log(rope.original_positions / (periods * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # not 0: the ramp becomes a step
    slowed = ((torch.arange(rope.rotary_dim // 2) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * slowed + plain * (1 - slowed)
