"""The KV memory of a runner: the groups of rows in computation, and the pool of pages that sequences share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...engine.batch import Ints
from .adapter import BatchCache, RowCache
from .plan import STEP, Make, Plan, Source, Span, Write


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The size of one token in a layer's cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int  # positions that a token sees, including its position; 0: all

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


@dataclass(slots=True, eq=False)
class ResidentGroup:
    """The caches, one for each layer, of the rows that one call of the model computes: RowCache for one row, BatchCache
    for several rows."""

    layers: Sequence[RowCache | BatchCache]
    lengths: list[int]  # number of positions of each row

    @property
    def arrays(self) -> list[mx.array]:
        """Keys and values [rows, kv heads, columns, dim] of each layer."""
        return [x for layer in self.layers for x in (layer.keys, layer.values)]

    def set_offsets(self) -> None:
        """Give the batch caches a new array of offsets. Call it before each call of the model: mlx-lm adds to the
        offsets lazily, and the expression would grow with every step."""
        if len(self.lengths) > 1:
            offset = mx.array(self.lengths)
            for layer in self.layers:
                layer.offset = offset

    def row(self, index: int, length: int) -> list[RowCache]:
        """The caches of a row, cut to its first `length` positions. They are copies, unless the group has only this
        row."""
        caches = [layer.row(index, self.lengths[index]) for layer in self.layers]
        for cache in caches:
            cache.trim(cache.offset - length)
        return caches


class Pool:
    """Keys and values of all pages in each layer, [1, kv heads, (pages + 1) * page_size, dim]: a page is a run of
    columns. Layers with a window may have pages of their own."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, window_pages: int = 0) -> None:
        """`window_pages`: number of pages in the layers with a window; 0: they have the pages of the other layers."""
        self._page_size = page_size
        self.windowed = [bool(window_pages and shape.window) for shape in shapes]
        columns = [((window_pages if own else num_pages) + 1) * page_size for own in self.windowed]
        sized = list(zip(shapes, columns, strict=True))
        self.keys = [mx.zeros((1, shape.kv_heads, count, shape.key_dim), shape.dtype) for shape, count in sized]
        self.values = [mx.zeros((1, shape.kv_heads, count, shape.value_dim), shape.dtype) for shape, count in sized]
        self.changed = False  # whether there were writes since the last `settle`

    def columns(self, pages: Sequence[int], start: int, end: int) -> Ints:
        """The columns of positions start…end-1 of the sequence with these pages."""
        positions = np.arange(start, end)
        return np.asarray(pages)[positions // self._page_size] * self._page_size + positions % self._page_size

    def write(self, group: ResidentGroup, spans: Sequence[Span]) -> None:
        """Copy the keys and values of these spans from the group to their pages, lazily."""
        rows = mx.array(np.concatenate([np.full(span.length - span.start, span.row) for span in spans]))
        moves = {}  # whether layers have pages of their own -> (columns of the group, columns of the pool)
        for windowed in set(self.windowed):
            end = group.layers[self.windowed.index(windowed)].size()
            columns = [np.arange(end - span.length + span.start, end) for span in spans]
            targets = [self.columns(span.table(windowed), span.start, span.length) for span in spans]
            moves[windowed] = (mx.array(np.concatenate(columns)), _index(np.concatenate(targets)))
        for number, (layer, windowed) in enumerate(zip(group.layers, self.windowed, strict=True)):
            stored_columns, target = moves[windowed]
            source = (rows, slice(None), stored_columns)
            for side, stored in ((self.keys, layer.keys), (self.values, layer.values)):
                side[number] = mx.put_along_axis(side[number], target, stored[source].swapaxes(0, 1)[None], axis=2)
        self.changed = True

    def read(self, source: Source, row: Sequence[RowCache]) -> None:
        """Fill an empty row with the positions of the source. The row also gets columns for later positions. Layers
        with a window get only the positions that their window reads."""
        reads = {own: self._padded_index(source, own) for own in set(self.windowed)}
        for cache, keys, values, windowed in zip(row, self.keys, self.values, self.windowed, strict=True):
            cache.first = source.first if windowed else 0
            cache.keys = mx.take_along_axis(keys, reads[windowed], axis=2)
            cache.values = mx.take_along_axis(values, reads[windowed], axis=2)
            cache.offset = source.length

    def _padded_index(self, source: Source, windowed: bool) -> mx.array:
        """The columns to read for a row, and columns for later positions."""
        start = source.first if windowed else 0
        read = self.columns(source.window_pages if windowed else source.pages, start, source.length)
        return _index(np.pad(read, (0, STEP - len(read) % STEP)))

    def copy(self, copies: Sequence[Sequence[int]], *, windowed: bool = False) -> None:
        """Copy pages, source to target, in the layers with or without pages of their own; all sources are read before
        any target is written."""
        pages = np.asarray(copies)[:, :, None] * self._page_size + np.arange(self._page_size)
        sources = _index(pages[:, 0].ravel())
        targets = _index(pages[:, 1].ravel())
        layers = [number for number, own in enumerate(self.windowed) if own == windowed]
        for side in (self.keys, self.values):
            stored = [mx.take_along_axis(side[number], sources, axis=2) for number in layers]
            mx.eval(stored)  # MLX would copy the whole pool if a lazy array still read it
            for number, new in zip(layers, stored, strict=True):
                side[number] = mx.put_along_axis(side[number], targets, new, axis=2)
        self.changed = True

    def settle(self) -> None:
        """Compute the lazy writes, which would keep the arrays of their groups in memory."""
        if self.changed:
            mx.eval(self.keys, self.values)
            self.changed = False


def _index(columns: Ints) -> mx.array:
    """An index along the columns of [rows, heads, columns, dim]."""
    return mx.array(columns.astype("u4"))[None, None, :, None]


class Caches:
    """The groups by their numbers, and the pool. Executes the instructions of a plan that move KV."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int, window_pages: int = 0) -> None:
        """As Pool."""
        self._windows = [shape.window for shape in shapes]
        self.pool = Pool(shapes, num_pages, page_size, window_pages)
        self.groups: dict[int, ResidentGroup] = {}

    def write(self, plan: Plan) -> None:
        """Write and copy pages, then drop columns that windows have passed."""
        self.write_pages(plan.writes)
        if plan.copies:
            self.pool.copy(plan.copies)
        if plan.window_copies:
            self.pool.copy(plan.window_copies, windowed=True)
        for group, columns in plan.drops:
            for layer, windowed in zip(self.groups[group].layers, self.pool.windowed, strict=True):
                if windowed:
                    layer.drop(columns)

    def write_pages(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self.pool.write(self.groups[write.group], write.spans)

    def make(self, make: Make) -> None:
        rows = [self._row(source) for source in make.sources]
        layers = rows[0] if len(rows) == 1 else [BatchCache.of(list(layer)) for layer in zip(*rows, strict=True)]
        self.groups[make.group] = ResidentGroup(layers, [source.length for source in make.sources])

    def _row(self, source: Source) -> list[RowCache]:
        if source.group:
            return self.groups[source.group].row(source.row, source.length)
        row = [RowCache(window) for window in self._windows]
        if source.length:
            self.pool.read(source, row)
        return row

    def keep(self, groups: Collection[int]) -> None:
        """Drop all groups except these."""
        self.groups = {number: group for number, group in self.groups.items() if number in groups}
