"""Rotary embeddings as ModelConfig describes them; mlx-lm's ropes know neither attention_factor nor truncate."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ...engine.modelconfig import Rope


class Frequencies(nn.Module):
    """Rope with a frequency for each pair of dimensions, `frequencies` [dims / 2] in radians per position."""

    def __init__(self, frequencies: NDArray[np.float32]) -> None:
        super().__init__()
        self.dims, self.traditional = 2 * len(frequencies), False
        self.set(frequencies)

    def set(self, frequencies: NDArray[np.float32]) -> None:
        self._freqs = mx.array(1.0 / frequencies)  # as mx.fast.rope takes them: positions per radian

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


class ScaledFrequencies(Frequencies):
    """The same, and the dimensions that rotate are multiplied by `factor`."""

    def __init__(self, frequencies: NDArray[np.float32], factor: float) -> None:
        super().__init__(frequencies)
        self.factor = factor

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rotated = x[..., : self.dims] * self.factor
        scaled = mx.concatenate([rotated, x[..., self.dims :]], axis=-1) if self.dims < x.shape[-1] else rotated
        return super().__call__(scaled, offset)


def rotation(rope: Rope, context: int) -> nn.Module:
    """The module that rotates queries and keys of a layer."""
    if rope.kind in ("default", "linear"):
        return nn.RoPE(rope.rotary_dim, traditional=False, base=rope.theta, scale=1.0 / rope.factor)
    inverse = frequencies(rope, context)
    if rope.attention_factor == 1.0 and rope.kind != "longrope":
        return Frequencies(inverse)
    return ScaledFrequencies(inverse, rope.attention_factor)


def frequencies(rope: Rope, context: int) -> NDArray[np.float32]:
    """[rotary_dim / 2] radians per position, of every kind but linear.

    LongRoPE has factors for short and for long texts. A switch between them would mix keys of both in the cache, so the
    context decides once: the long factors if it exceeds the original training's.
    """
    plain = _plain(rope.theta, rope.rotary_dim)
    if rope.kind == "longrope":
        factors = rope.long_factors if context > rope.original_positions else rope.short_factors
        return (plain / np.array(factors, np.float32)).astype(np.float32)
    kept: NDArray[Any] = np.ones_like(plain)  # 1: a frequency as it is, 0: divided by the factor
    if rope.kind == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0.0, 1.0)
    elif rope.kind == "yarn":
        low, high = (_yarn_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        kept = 1.0 - ((np.arange(len(plain)) - low) / (high - low or 0.001)).clip(0.0, 1.0)
    return (plain * kept + plain / rope.factor * (1.0 - kept)).astype(np.float32)


def _yarn_dimension(rope: Rope, turns: float) -> float:
    """The dimension that makes so many turns over the original context."""
    return rope.rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rotates_as(module: nn.Module, rope: Rope, context: int) -> bool:
    """Whether a layer's module is what `rotation` would give."""
    wanted = rotation(rope, context)
    if type(module) is not type(wanted) or (module.dims, module.traditional) != (wanted.dims, wanted.traditional):
        return False
    if isinstance(module, nn.RoPE):
        return (module.base, module.scale) == (wanted.base, wanted.scale)
    scaled = not isinstance(module, ScaledFrequencies) or module.factor == wanted.factor
    return scaled and bool(mx.array_equal(module._freqs, wanted._freqs))


def _plain(theta: float, dims: int) -> NDArray[np.float32]:
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
