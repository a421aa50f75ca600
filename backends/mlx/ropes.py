"""Rotary embeddings of ModelConfig. mlx-lm's ropes ignore attention_factor and truncate."""

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
        self.dims = 2 * len(frequencies)
        self.traditional = False
        self.set(frequencies)

    def set(self, frequencies: NDArray[np.float32]) -> None:
        self._freqs = mx.array(1.0 / frequencies)  # as mx.fast.rope takes them: positions per radian

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


class ScaledFrequencies(Frequencies):
    """The same, with the dimensions that rotate multiplied by `factor`."""

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

    LongRoPE has factors for short and for long texts. The context decides once, since keys of both in one cache would
    not match: long factors if it exceeds the original context.
    """
    plain = _plain(rope.theta, rope.rotary_dim)
    if rope.kind == "longrope":
        factors = rope.long_factors if context > rope.original_positions else rope.short_factors
        return (plain / np.array(factors, np.float32)).astype(np.float32)
    share: NDArray[Any] = np.ones_like(plain)  # 1: the plain frequency, 0: the frequency divided by the factor
    if rope.kind == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)
        share = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clip(0.0, 1.0)
    elif rope.kind == "yarn":
        low = _yarn_dimension(rope, rope.beta_fast)
        high = _yarn_dimension(rope, rope.beta_slow)
        low = max(math.floor(low) if rope.truncate else low, 0)
        high = min(math.ceil(high) if rope.truncate else high, rope.rotary_dim - 1)
        share = 1.0 - ((np.arange(len(plain)) - low) / (high - low or 0.001)).clip(0.0, 1.0)
    return (plain * share + plain / rope.factor * (1.0 - share)).astype(np.float32)


def _yarn_dimension(rope: Rope, turns: float) -> float:
    """The dimension that makes this number of turns over the original context."""
    return rope.rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rotates_as(module: nn.Module, rope: Rope, context: int) -> bool:
    """Whether a layer's module equals that of `rotation`."""
    expected = rotation(rope, context)
    names = ("dims", "traditional", "base", "scale", "factor")
    if type(module) is not type(expected) or any(
        getattr(module, name, None) != getattr(expected, name, None) for name in names
    ):
        return False
    return isinstance(module, nn.RoPE) or bool(mx.array_equal(module._freqs, expected._freqs))


def _plain(theta: float, dims: int) -> NDArray[np.float32]:
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
