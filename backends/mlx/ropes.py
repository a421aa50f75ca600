"""MLX modules for the rotary embeddings in ModelConfig. mlx-lm's modules ignore attention_factor and truncate."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ...engine.files.rope import frequencies as rope_frequencies
from ...engine.files.rope_config import Rope


class Frequencies(nn.Module):
    """A rope with one frequency for each pair of dimensions."""

    def __init__(self, rope: Rope, context: int) -> None:
        super().__init__()
        self._rope = rope
        self.set_context(context)

    def set_context(self, context: int) -> None:
        """Choose LongRoPE's long or short factors for this maximum context."""
        self._freqs = mx.array(1.0 / frequencies(self._rope, context))  # mx.fast.rope expects positions per radian

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[rows, heads, tokens, dim] -> the same shape, rotated."""
        dims = self._rope.rotary_dim
        factor = self._rope.attention_factor
        if factor != 1.0:
            scaled = x[..., :dims] * factor
            x = scaled if dims == x.shape[-1] else mx.concatenate([scaled, x[..., dims:]], axis=-1)
        return mx.fast.rope(x, dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._freqs)


class NoRotation(nn.Module):
    """The rope of a layer without rotation of queries and keys."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return x


def rotation(rope: Rope, context: int) -> nn.Module:
    """The module that rotates the queries and keys of a layer."""
    if rope.kind in ("default", "linear"):
        return nn.RoPE(rope.rotary_dim, traditional=False, base=rope.theta, scale=1.0 / rope.factor)
    return Frequencies(rope, context)


def frequencies(rope: Rope, context: int) -> NDArray[np.float32]:
    """The frequencies [rotary_dim / 2], in radians per position."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    radians: NDArray[np.float32] = rope_frequencies(
        rope, context, np.power(np.float32(rope.theta), exponents), lambda numbers: np.array(numbers, np.float32)
    )
    return radians
