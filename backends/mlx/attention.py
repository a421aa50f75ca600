"""Attention of mlx-lm's models over our caches: of several groups, and by kernels of ours where they read them.

What a model hands on from cache to attention, keys, values and masks, it does not look at: it may be what this file
says.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ...kernels.mlx_cuda import few_tokens
from ...kernels.mlx_cuda.decode import Decode, decode, prepared, visible
from .rotary import Unturned


class Ragged(list[Any]):
    """Keys, values or masks of several groups; a model hands them on to attention as they are, and the next three."""


class Unread(NamedTuple):
    """Keys or values: [rows, kv heads, columns, dim], used up to `end`."""

    held: mx.array
    end: int

    def read(self) -> mx.array:
        return self.held[..., : self.end, :]


class Seen(NamedTuple):
    """What each row's one token sees, as decode() wants it."""

    firsts: mx.array
    end: mx.array
    splits: int

    def attend(self, queries: mx.array, keys: Unread, values: Unread, scale: float) -> mx.array:
        return decode(queries, keys.held, values.held, *self, scale)

    def visible(self, columns: int) -> mx.array:
        return visible(self.firsts, self.end, columns)


class SeenByFew(NamedTuple):
    """What few tokens of each row see, as few_tokens wants it."""

    firsts: mx.array
    end: mx.array
    longest: int  # columns from a row's first to the end, at most
    new: int
    window: int

    @property
    def together(self) -> int:
        """Columns that a row's tokens see, at most."""
        return min(self.longest, self.window + self.new - 1) if self.window else self.longest

    def attend(self, queries: mx.array, keys: Unread, values: Unread, scale: float) -> mx.array:
        splits = few_tokens.shares(self.together, *queries.shape[:3])
        place = self.firsts, self.end, self.window
        return few_tokens.attend(queries, keys.held, values.held, *place, splits, scale)

    def visible(self, columns: int) -> mx.array:
        return visible(self.firsts, self.end, columns, self.new, self.window)


class Attended:
    """What attention asks a cache of ours for."""

    _decode: tuple[int, Decode] | None = None

    def decode(self, queries: mx.array, keys: mx.array, values: mx.array, seen: Seen, scale: float) -> mx.array:
        """Of all rows, where they are one group."""
        if self._decode is None or self._decode[0] != seen.splits:
            self._decode = seen.splits, prepared(queries, keys, values, seen.splits, scale)
        return self._decode[1](queries, keys, values, seen.firsts, seen.end)


NAME = "scaled_dot_product_attention"  # of mlx-lm's, which every model imports


def hook_attention(model: nn.Module) -> None:
    """Let a model's attention take the keys of several groups: its modules name the function they call."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        own = getattr(module, NAME, None)
        if own is not None and not isinstance(own, Attention):
            setattr(module, NAME, Attention(own))


class Attention:
    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """As mlx-lm's own, which computes for caches that are not ours; rows are those of all groups, one after the
        other. No cache: the keys are another layer's, or one group's of several."""
        if isinstance(queries, Unturned):
            attended: mx.array = cache.attend(self, queries, keys, values, scale, mask, sinks)
            return attended
        if isinstance(keys, mx.array):
            if isinstance(cache, Attended):
                return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
            return self._own(queries, keys, values, cache, scale, mask, sinks)
        if isinstance(keys, Unread):
            if isinstance(mask, Seen) and sinks is None and cache is not None:
                return cache.decode(queries, keys.held, values.held, mask, scale)
            if isinstance(mask, Seen | SeenByFew):
                if sinks is None:
                    return mask.attend(queries, keys, values, scale)
                mask = mask.visible(keys.end)
            return self(queries, keys.read(), values.read(), cache, scale, mask, sinks)
        bounds, row = [], 0
        for part in keys[:-1]:
            bounds.append(row := row + len(part[0] if isinstance(part, Unread) else part))
        parts = zip(mx.split(queries, bounds), keys, values, mask, strict=True)
        return mx.concatenate([self(q, k, v, None, scale, own, sinks) for q, k, v, own in parts])
