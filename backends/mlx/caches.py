"""The caches a model of mlx-lm writes and reads, for many rows at once.

Rows that are computed together lie together, right-aligned, so that a step writes one column for all of them:

    row 0   . . . k0 k1 k2 | k3        the column at `end` is written next
    row 1   k0 k1 k2 k3 k4 | k5
            ^ padding [3, 0]

A model is handed one LayerCache a layer, which has what mlx-lm's own caches have: `offset`, `update_and_fetch` and
`make_mask`. Rows of very different length are kept in several groups, whose attention is computed group by group
(attention.py), everything else once for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from ...kernels.metal.rope_store import Store
from ...kernels.mlx_cuda import few_tokens, tensor_cores
from ...kernels.mlx_cuda.decode import shares
from . import rotary
from .attention import Attended, Ragged, Seen, SeenByFew, Unread
from .rotary import LATER, Unturned

DECODES = mx.cuda.is_available()  # a kernel of ours reads rows of different length; elsewhere MLX's own does with masks
# Prompts are computed in multiples of so many tokens: on CUDA, attention over each new length takes 50 ms to prepare.
PREFILL = 64 if mx.cuda.is_available() else 1
FEW_TOKENS = tensor_cores.available()  # a kernel of ours computes attention of few: it has nothing to prepare
FEW = 16  # they are computed in multiples of so many: rows that are of one length then share a call
STEP = 256  # columns that a group grows by


def in_steps(columns: int) -> int:
    """What a group has room for that needs so many."""
    return -(-columns // STEP) * STEP


Append = Callable[[int, mx.array, mx.array], tuple[Any, Any]]  # of a layer's new keys and values


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token adds to a layer's cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int  # positions a token sees, its own included; 0: all

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


def few(new: int, shapes: Sequence[LayerShape]) -> bool:
    """Whether our own kernel computes attention of so many tokens of each row."""
    return (
        FEW_TOKENS
        and 1 < new <= few_tokens.TOKENS
        and all(few_tokens.fits(new, (shape.key_dim, shape.value_dim), shape.dtype) for shape in shapes)
    )


def filled(new: int, shapes: Sequence[LayerShape]) -> int:
    """How many tokens are computed for so many of a row."""
    if new == 1:
        return 1
    multiple = FEW if few(new, shapes) else PREFILL
    return -(-new // multiple) * multiple


@dataclass(slots=True, eq=False)
class Group:
    """Caches of some rows: keys and values of each layer [rows, kv heads, columns, dim], used up to `end`."""

    keys: list[mx.array]
    values: list[mx.array]
    end: int
    padding: list[int] = field(default_factory=list)  # of each row: unused columns before its first position
    _stores: dict[int, Store] = field(default_factory=dict)  # by layer

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape], room: int, rows: int = 1) -> Group:
        """Rows without positions."""
        room = in_steps(max(room, 1))
        return cls(
            [mx.zeros((rows, shape.kv_heads, room, shape.key_dim), shape.dtype) for shape in shapes],
            [mx.zeros((rows, shape.kv_heads, room, shape.value_dim), shape.dtype) for shape in shapes],
            0,
            [0] * rows,
        )

    @property
    def columns(self) -> int:
        """Of each row, used or not."""
        return self.keys[0].shape[2]

    def write(self, layer: int, keys: mx.array, values: mx.array) -> int:
        """[rows, kv heads, new, dim] behind `end`, which stays as all layers write in the same place -> the new end."""
        end = self.end + keys.shape[2]
        if end > self.keys[layer].shape[2]:
            self.keys[layer], self.values[layer] = _grown(self.keys[layer], end), _grown(self.values[layer], end)
        self.keys[layer][..., self.end : end, :] = keys
        self.values[layer][..., self.end : end, :] = values
        return end

    def reserve(self, new: int) -> int:
        """Make room for so many columns in all layers -> where they end."""
        end = self.end + new
        if end > self.columns:
            self.keys, self.values = ([_grown(x, end) for x in held] for held in (self.keys, self.values))
        return end

    def append(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write, and read all positions."""
        end = self.write(layer, keys, values)
        return self.keys[layer][..., :end, :], self.values[layer][..., :end, :]

    def store(self, layer: int, queries: Unturned, keys: mx.array, values: mx.array, place: Seen) -> mx.array:
        """Write one column, where it lies, and turn its keys before, and the queries -> those. There is room for it."""
        if layer not in self._stores:
            self._stores[layer] = rotary.prepared(queries.x, self.keys[layer], self.values[layer], queries.rope)
        turned, self.keys[layer], self.values[layer] = self._stores[layer](
            queries.x, keys, values, self.keys[layer], self.values[layer], place.firsts, place.end
        )
        return turned

    def append_unread(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Unread, Unread]:
        """Write; whoever reads knows which columns."""
        end = self.write(layer, keys, values)
        return Unread(self.keys[layer], end), Unread(self.values[layer], end)

    def mask(self, new: int, window: int, as_array: bool) -> mx.array | str | None:
        """For the next `new` columns, as mx.fast.scaled_dot_product_attention wants it."""
        end = self.end + new
        window = window if window < end else 0
        if not any(self.padding) and not window:
            if new == 1:
                return None
            if not as_array:
                return "causal"
        columns = mx.arange(end)
        places = mx.arange(self.end, end)[:, None]
        seen = places >= columns
        if window:
            seen = seen & (places < columns + window)
        if any(self.padding):
            seen = seen & (columns >= mx.array(self.padding)[:, None, None, None])
        return seen

    def seen_by_few(self, new: int, window: int) -> SeenByFew:
        """The mask of a few new columns, for a kernel that reads each row's own columns only."""
        end = self.end + new
        padding = mx.array(self.padding, mx.int32)
        return SeenByFew(padding, mx.array([end], mx.int32), end - min(self.padding), new, window)

    def seen(self, window: int) -> Seen:
        """The same of one new column."""
        end = self.end + 1
        firsts = [max(padding, end - window if window else 0) for padding in self.padding]
        return Seen(mx.array(firsts, mx.int32), mx.array([end], mx.int32), shares(end - min(firsts), len(firsts)))

    def begun(self, row: int, start: int, columns: int) -> Group:
        """Positions 0…start-1 of a row as a group of its own, which holds the same arrays: only as many columns as
        that needs, unless few are too many, and in whole steps if it can be: calls are traced by how many there are."""
        own, first = slice(row, row + 1), self.padding[row]
        if self.columns <= first + columns + STEP:
            columns = self.columns - first
            columns = columns if columns % STEP > columns - start else columns // STEP * STEP
        keys, values = ([x[own, :, first : first + columns] for x in held] for held in (self.keys, self.values))
        return Group(keys, values, start, [0])

    def taken(self, rows: list[int], end: int) -> tuple[list[mx.array], list[mx.array]]:
        """Keys and values of these rows, their last `end` columns, filled up on the left where there are fewer."""

        def take(x: mx.array) -> mx.array:
            x = x[..., max(0, self.end - end) : self.end, :]
            if rows != list(range(len(self.padding))):
                x = x[mx.array(rows)]
            return mx.pad(x, [(0, 0), (0, 0), (end - x.shape[2], 0), (0, 0)]) if x.shape[2] < end else x

        return [take(x) for x in self.keys], [take(x) for x in self.values]


def _grown(held: mx.array, end: int) -> mx.array:
    return mx.pad(held, [(0, 0), (0, 0), (0, in_steps(end) - held.shape[2]), (0, 0)])


class Forward:
    """The caches of one call of a model: rows of `groups` one after the other, `new` tokens each.

    `in_place`: one token a row may be written where it lies (see rotary.py). The caches are then arrays of their own,
    which a call before this one wrote; what it wrote is computed before this is, and so is this before anybody but
    attention reads it.
    """

    def __init__(self, groups: list[Group], new: int, shapes: Sequence[LayerShape], in_place: bool = False) -> None:
        self._groups, self._new, self._steps = groups, new, 0
        self.in_place = in_place and self._has_room()
        counts = [len(group.padding) for group in groups]
        self._bounds = [sum(counts[:at]) for at in range(1, len(counts))]
        lengths = [group.end - padding for group in groups for padding in group.padding]
        self.offset: Any = LATER
        if not self.in_place:
            self.offset = lengths[0] if len(set(lengths)) == 1 else mx.array(lengths)
        self._windows = [shape.window for shape in shapes]
        self._few = few(new, shapes)
        self._unread, self._seen = self._to_be_unread(), dict[int, Seen]()
        pairs = zip(groups, self._unread, strict=True)
        self._appends = [group.append_unread if unread else group.append for group, unread in pairs]

    def layers(self) -> list[LayerCache]:
        """What a model is handed. Not kept: they have this, and with them in it groups would wait for Python's gc."""
        return [
            LayerCache(self, layer, window, handed_on if self.in_place else partial(self.append, layer))
            for layer, window in enumerate(self._windows)
        ]

    def _to_be_unread(self) -> list[bool]:
        """Of which groups a kernel of ours reads: short rows of one length are MLX's own's, called with less ado."""
        decodes = DECODES and self._new == 1
        return [
            self._few or (decodes and (self.in_place or any(self._windows) or group.end >= STEP or any(group.padding)))
            for group in self._groups
        ]

    def _has_room(self) -> bool:
        return all(group.end < group.keys[0].shape[2] for group in self._groups)

    def again(self, layers: list[LayerCache], in_place: bool) -> bool:
        """Make `layers` ready for one more token of each row, with nothing to copy to the device. False: a new one must
        be."""
        self._steps += 1
        if (
            self._steps == STEP  # now and then anyway: what a model never asks for would stay lazy for ever
            or self._new > 1
            or any(self._windows)
            or self.in_place != (in_place and self._has_room())
            or self._to_be_unread() != self._unread
        ):
            return False
        if not self.in_place:
            self.offset = self.offset + 1
            for layer in layers:
                layer.offset = self.offset
        for at, (firsts, end, _) in self._seen.items():
            group = self._groups[at]
            self._seen[at] = Seen(firsts, end + 1, shares(group.end + 1 - min(group.padding), len(group.padding)))
        return True

    @property
    def append(self) -> Append:
        """Writes a layer's new keys and values; returns all of them."""
        return self._appends[0] if len(self._groups) == 1 else self._append

    def _append(self, layer: int, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        parts = zip(self._appends, mx.split(keys, self._bounds), mx.split(values, self._bounds), strict=True)
        held = [append(layer, *part) for append, *part in parts]
        return Ragged(keys for keys, _ in held), Ragged(values for _, values in held)

    def store(self, layer: int, queries: Unturned, keys: mx.array, values: mx.array) -> tuple[mx.array, Any, Any]:
        """Write a layer's new keys and values in place -> its queries, turned, and all keys and values."""
        return by_group(self._store, self._bounds, layer, queries, keys, values)

    def _store(
        self, at: int, layer: int, queries: Unturned, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, Any, Any]:
        group = self._groups[at]
        turned = group.store(layer, queries, keys, values, self._seen_by(at, 0))
        held_keys, held_values = Unread(group.keys[layer], group.end + 1), Unread(group.values[layer], group.end + 1)
        if self._unread[at]:
            return turned, held_keys, held_values
        return turned, held_keys.read(), held_values.read()

    def mask(self, window: int, as_array: bool) -> Any:
        masks = [self._mask(at, window, as_array) for at in range(len(self._groups))]
        return masks[0] if len(masks) == 1 else Ragged(masks)

    def _mask(self, at: int, window: int, as_array: bool) -> Any:
        if self._few:
            return self._groups[at].seen_by_few(self._new, window)
        return self._seen_by(at, window) if self._unread[at] else self._groups[at].mask(self._new, window, as_array)

    def _seen_by(self, at: int, window: int) -> Seen:
        if window:
            return self._groups[at].seen(window)
        if at not in self._seen:
            self._seen[at] = self._groups[at].seen(0)
        return self._seen[at]

    def finish(self, new: list[int]) -> None:
        """The model was called: of what it wrote so many tokens of each group are part of the caches, and others follow
        in the place of the rest."""
        for group, count in zip(self._groups, new, strict=True):
            group.end += count


def by_group(
    store: Callable[..., tuple[mx.array, Any, Any]],
    bounds: list[int],
    layer: int,
    queries: Unturned,
    keys: mx.array,
    values: mx.array,
) -> tuple[mx.array, Any, Any]:
    """What `store` answers for each group, whose rows end at `bounds`, as one."""
    if not bounds:
        return store(0, layer, queries, keys, values)
    parts = zip(*(mx.split(x, bounds) for x in (queries.x, keys, values)), strict=True)
    stored = [store(at, layer, Unturned(q, queries.rope), k, v) for at, (q, k, v) in enumerate(parts)]
    turned, held_keys, held_values = zip(*stored, strict=True)
    return mx.concatenate(list(turned)), Ragged(held_keys), Ragged(held_values)


class Step(Protocol):
    """What a model's layers ask of the caches of one call."""

    offset: Any

    def mask(self, window: int, as_array: bool) -> Any: ...

    def store(self, layer: int, queries: Unturned, keys: mx.array, values: mx.array) -> tuple[mx.array, Any, Any]:
        """Write a layer's new keys and values, where `offset` is LATER -> its queries, turned, and all keys and
        values."""


class LayerCache(Attended):
    """What a model of mlx-lm sees of a Step in one of its layers.

    `offset`: positions before the new tokens, of each row; `update_and_fetch`: keys, values -> those of all positions.
    """

    def __init__(self, step: Step, layer: int, window: int, update_and_fetch: Callable[[Any, Any], Any]) -> None:
        self._step, self._layer, self._window = step, layer, window
        # Attributes, not methods: a step of a small model is as long as the calls that its layers make.
        self.offset, self.update_and_fetch = step.offset, update_and_fetch

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Named as mlx-lm names it. A layer whose own cache would turn over sees its window, asked for or not."""
        windows = [window for window in (self._window, window_size) if window]
        return self._step.mask(min(windows, default=0), return_array)

    def attend(
        self, attention: Any, queries: Unturned, keys: Unturned, values: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Where `offset` was LATER: write, then attention."""
        stored = self._step.store(self._layer, queries, keys.x, values)
        found: mx.array = attention(*stored, self, scale, mask, sinks)
        return found


def handed_on(keys: Unturned, values: mx.array) -> tuple[Unturned, mx.array]:
    return keys, values
