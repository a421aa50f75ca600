"""KV memory of a runner: the groups whose rows compute, and the pool of pages that sequences share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...engine.batch import Ints
from .adapter import BatchCache, RowCache, new_cache
from .plan import STEP, Begin, Gather, Move, Read, Span, Trim, Write


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token adds to a layer's cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int  # positions that a token sees, its own included; 0: all

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


@dataclass(slots=True, eq=False)
class Group:
    """Caches of rows that one call computes: one of mlx-lm's for each layer, RowCache for one row."""

    layers: list[RowCache | BatchCache]
    lengths: list[int]  # positions of each row

    @property
    def arrays(self) -> list[mx.array]:
        """[rows, kv heads, columns, dim] of each layer."""
        return [x for layer in self.layers for x in (layer.keys, layer.values)]

    def place(self) -> None:
        """Before a call: batch caches take their offsets from one array, which no chain of steps depends on."""
        if len(self.lengths) > 1:
            offset = mx.array(self.lengths)
            for layer in self.layers:
                layer.offset = offset

    def row(self, index: int) -> list[RowCache]:
        return [layer.row(index) for layer in self.layers]


class Pool:
    """Keys and values of all pages in each layer, [1, kv heads, (pages + 1) * page_size, dim]: a page is a run of
    columns."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        columns = (num_pages + 1) * page_size
        self._page_size = page_size
        self._windows = [shape.window for shape in shapes]
        self.keys = [mx.zeros((1, shape.kv_heads, columns, shape.key_dim), shape.dtype) for shape in shapes]
        self.values = [mx.zeros((1, shape.kv_heads, columns, shape.value_dim), shape.dtype) for shape in shapes]
        self.changed = False  # written since `settle`

    def columns(self, pages: Sequence[int], start: int, end: int) -> Ints:
        """Columns of positions start…end-1 of a sequence."""
        positions = np.arange(start, end)
        return np.asarray(pages)[positions // self._page_size] * self._page_size + positions % self._page_size

    def write(self, group: Group, spans: Sequence[Span]) -> None:
        """Positions of rows of a group."""
        end = group.layers[0].size()
        parts = [np.arange(end - span.length + span.start, end) for span in spans]
        rows = mx.array(np.repeat([span.row for span in spans], [len(part) for part in parts]))
        columns = mx.array(np.concatenate(parts))
        index = _index(np.concatenate([self.columns(span.pages, span.start, span.length) for span in spans]))
        for at, layer in enumerate(group.layers):
            keys = layer.keys[rows, :, columns].swapaxes(0, 1)[None]
            values = layer.values[rows, :, columns].swapaxes(0, 1)[None]
            self.keys[at] = mx.put_along_axis(self.keys[at], index, keys, axis=2)
            self.values[at] = mx.put_along_axis(self.values[at], index, values, axis=2)
        self.changed = True

    def read(self, pages: Sequence[int], length: int) -> Group:
        """A row with positions 0…length-1, and room for more."""
        room = -(-(length + 1) // STEP) * STEP
        index = _index(np.pad(self.columns(pages, 0, length), (0, room - length)))
        layers: list[RowCache | BatchCache] = []
        for keys, values, window in zip(self.keys, self.values, self._windows, strict=True):
            arrays = mx.take_along_axis(keys, index, axis=2), mx.take_along_axis(values, index, axis=2)
            cache: RowCache = RowCache.from_state((*arrays, length))
            cache.window = window
            layers.append(cache)
        return Group(layers, [length])

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, source to target; all sources are read before any target is written."""
        offsets = np.arange(self._page_size)
        pages = np.asarray(copies)[:, :, None] * self._page_size + offsets
        sources = _index(pages[:, 0].ravel())
        targets = _index(pages[:, 1].ravel())
        for side in (self.keys, self.values):
            pages_read = [mx.take_along_axis(x, sources, axis=2) for x in side]
            mx.eval(pages_read)  # a pool that a lazy array still reads would be copied as a whole
            side[:] = [mx.put_along_axis(x, targets, new, axis=2) for x, new in zip(side, pages_read, strict=True)]
        self.changed = True

    def settle(self) -> None:
        """Compute the writes: a lazy write would keep the groups that it reads."""
        if self.changed:
            mx.eval(self.keys, self.values)
            self.changed = False


def _index(columns: Ints) -> mx.array:
    """An index along the columns of [rows, heads, columns, dim]."""
    return mx.array(columns.astype("u4"))[None, None, :, None]


class Caches:
    """Groups by number, and the pool. It does the cache moves of a plan."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        self._shapes = shapes
        self.pool = Pool(shapes, num_pages, page_size)
        self.groups: dict[int, Group] = {}

    def write(self, writes: Sequence[Write], copies: Sequence[tuple[int, int]]) -> None:
        for write in writes:
            self.pool.write(self.groups[write.group], write.spans)
        if copies:
            self.pool.copy(copies)

    def move(self, move: Move) -> None:
        match move:
            case Begin(group, rows):
                layers = [new_cache(rows, shape.window) for shape in self._shapes]
                self.groups[group] = Group(layers, [0] * rows)
            case Read(group, pages, length):
                self.groups[group] = self.pool.read(pages, length)
            case Trim(group, length):
                for layer in self.groups[group].layers:
                    layer.trim(layer.offset - length)
                self.groups[group].lengths = [length]
            case Gather(group, sources):
                self.groups[group] = self._gathered(sources)

    def _gathered(self, sources: Sequence[tuple[int, int]]) -> Group:
        rows = [self.groups[group].row(row) for group, row in sources]
        lengths = [self.groups[group].lengths[row] for group, row in sources]
        if len(rows) == 1:
            return Group([*rows[0]], lengths)
        return Group([BatchCache.of(list(layer)) for layer in zip(*rows, strict=True)], lengths)

    def keep(self, groups: Collection[int]) -> None:
        """Drop all other groups."""
        self.groups = {number: group for number, group in self.groups.items() if number in groups}
