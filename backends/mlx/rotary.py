"""Layers that leave the turning of queries and keys to whoever writes the keys: one kernel does both.

A layer of mlx-lm calls `rope(queries, offset)`, `rope(keys, offset)`, `cache.update_and_fetch(keys, values)` and
attention, one after the other. Where a cache's offset is LATER, the first three hand on what they were given, and
attention asks the cache for the rest (LayerCache.attend).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE

from ...kernels.metal import rope_store as metal
from ...kernels.metal.rope_store import Rope
from ...kernels.mlx_cuda import decode
from ...kernels.mlx_cuda import rope_store as cuda
from .experts import ASKED
from .ropes import Frequencies
from .trunk import Trunk

IN_PLACE = mx.cuda.is_available()  # elsewhere for those who ask
# Where MLX's attention of one token is one kernel on Metal, which reads keys where they lie: dims of a head, and heads
# of queries that share one of keys.
METAL_DIMS, METAL_SHARED = (64, 96, 128, 256), 32

LATER: Any = object()  # as an offset; a model that computes with it fails its trial
prepared = cuda.prepared if mx.cuda.is_available() else metal.prepared


class Unturned(NamedTuple):
    """Queries or keys [rows, heads, new, dim], and how they are to be turned."""

    x: mx.array
    rope: Rope


class _Late:
    """Mixed into the class of a rope."""

    rope: Rope

    def __call__(self, x: mx.array, offset: Any = 0) -> Any:
        return Unturned(x, self.rope) if offset is LATER else super().__call__(x, offset)  # type: ignore[misc]


# Those that are one call of mx.fast.rope.
LATE = {kind: type(kind.__name__, (_Late, kind), {}) for kind in (nn.RoPE, Llama3RoPE, ProportionalRoPE, Frequencies)}


def turns_late(model: nn.Module, trunk: Trunk, layers: int) -> bool:
    """Let all layers of a model take LATER for an offset. False: they do not, or nobody asks for the kernel, or it does
    not compute theirs; then they are as they were."""
    if not IN_PLACE and os.environ.get(ASKED) != "1":
        return False
    ropes = [(part, type(part)) for part in model.modules() if type(part) in LATE]
    for part, kind in ropes:
        object.__setattr__(part, "rope", _rope(part))
        part.__class__ = LATE[kind]
    with suppress(TypeError, ValueError, AttributeError, IndexError):
        if all(_passed(model, trunk, layers, tokens) for tokens in (1, 2)):
            return True
    for part, kind in ropes:
        part.__class__ = kind
    return False


def _passed(model: nn.Module, trunk: Trunk, layers: int, tokens: int) -> bool:
    """With one token, and with several: only those have a mask in some models."""
    trials = [_Trial() for _ in range(layers)]
    trunk.call(model, mx.zeros((1, tokens), mx.int32), trials, 0)
    return all(trial.passed for trial in trials)


def _rope(part: nn.Module) -> Rope:
    if isinstance(part, nn.RoPE):
        return Rope(part.dims, part.traditional, part.base, part.scale)
    return Rope(part.dims, part.traditional, None, freqs=part._freqs)


class _Trial:
    """A cache that finds out whether its layer does as the first lines of this file say; nothing is computed."""

    offset = LATER
    mask: Any = object()

    def __init__(self) -> None:
        self.passed = False

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.mask

    def attend(
        self, attention: Any, queries: Unturned, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        if keys.rope is not queries.rope or mask is not self.mask or sinks is not None:
            raise TypeError("attention that our kernels do not compute")
        self.passed = _fits(queries.x, keys.x, values, queries.rope)
        return mx.zeros((*queries.x.shape[:3], values.shape[3]), values.dtype)


def _fits(q: mx.array, k: mx.array, v: mx.array, rope: Rope) -> bool:
    """Whether a kernel turns and writes these, and the attention after it is one kernel, too."""
    dims, dtypes = (k.shape[3], v.shape[3]), (q.dtype, k.dtype, v.dtype)
    if mx.cuda.is_available():
        return metal.fits(dims, dtypes, rope) and decode.fits(q.shape, k.shape[1], dims, dtypes)
    if mx.metal.is_available():
        alone = dims[0] == dims[1] and dims[0] in METAL_DIMS and q.shape[1] <= METAL_SHARED * k.shape[1]
        return metal.fits(dims, dtypes, rope) and alone
    return True
