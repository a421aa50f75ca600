"""Frequencies of rotary position embeddings, for arrays of numpy and torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .rope_config import Rope

Array = Any  # an array of numpy or a tensor of torch


def frequencies(rope: Rope, context: int, powers: Array, array: Callable[[Sequence[float]], Array]) -> Array:
    """[rotary_dim / 2] radians per position, float32.

    `powers` is theta ** (2 i / rotary_dim) for each pair of dimensions i, float32. `array` makes an array of the same
    library from numbers.

    LongRoPE has factors for short and for long texts. A change of factors would make cached keys wrong. So `context`,
    the configured maximum, decides once: long factors if it exceeds the context length of the original training.
    """
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        rotated = array([1.0] * rope.rotated_pairs + [0.0] * (len(plain) - rope.rotated_pairs))
        return plain * rotated / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, array(range(len(plain))))
    if rope.kind == "longrope":
        factors = rope.long_factors if context > rope.original_positions else rope.short_factors
        return 1.0 / (array(factors) * powers)
    return plain


def _llama3(rope: Rope, plain: Array) -> Array:
    """Divides low frequencies by the factor, keeps high ones and blends those between (Llama 3.1)."""
    rotations = rope.original_positions * plain / (2 * math.pi)  # over the original context
    share = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0.0, 1.0)
    return plain / rope.factor * (1 - share) + plain * share


def _yarn(rope: Rope, plain: Array, pairs: Array) -> Array:
    """Divides the low frequencies by the factor, with a linear ramp over dimensions (Peng et al., 2023)."""
    low = _yarn_dimension(rope, rope.beta_fast)
    high = _yarn_dimension(rope, rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # avoids a division by 0
    slowed = ((pairs - low) / width).clip(0.0, 1.0)
    return plain / rope.factor * slowed + plain * (1 - slowed)


def _yarn_dimension(rope: Rope, rotations: float) -> float:
    """The dimension that rotates this many times over the original context."""
    return rope.rotary_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
