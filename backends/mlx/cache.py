"""The KV memory of a runner: the groups of rows in computation, and the pool of pages that sequences share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...engine.batch import Ints
from .adapter import BatchCache, RowCache
from .plan import STEP, Make, Source, Span, Write


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
        caches = [layer.row(index) for layer in self.layers]
        for cache in caches:
            cache.trim(cache.offset - length)
        return caches


class Pool:
    """Keys and values of all pages in each layer, [1, kv heads, (pages + 1) * page_size, dim]: a page is a run of
    columns."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        columns = (num_pages + 1) * page_size
        self._page_size = page_size
        self.keys = [mx.zeros((1, shape.kv_heads, columns, shape.key_dim), shape.dtype) for shape in shapes]
        self.values = [mx.zeros((1, shape.kv_heads, columns, shape.value_dim), shape.dtype) for shape in shapes]
        self.changed = False  # whether there were writes since the last `settle`

    def columns(self, pages: Sequence[int], start: int, end: int) -> Ints:
        """The columns of positions start…end-1 of the sequence with these pages."""
        positions = np.arange(start, end)
        return np.asarray(pages)[positions // self._page_size] * self._page_size + positions % self._page_size

    def write(self, group: ResidentGroup, spans: Sequence[Span]) -> None:
        """Copy the keys and values of these spans from the group to their pages, lazily."""
        end = group.layers[0].size()
        rows = np.concatenate([np.full(span.length - span.start, span.row) for span in spans])
        columns = np.concatenate([np.arange(end - span.length + span.start, end) for span in spans])
        index = _index(np.concatenate([self.columns(span.pages, span.start, span.length) for span in spans]))
        source = (mx.array(rows), slice(None), mx.array(columns))
        for number, layer in enumerate(group.layers):
            for side, stored in ((self.keys, layer.keys), (self.values, layer.values)):
                side[number] = mx.put_along_axis(side[number], index, stored[source].swapaxes(0, 1)[None], axis=2)
        self.changed = True

    def read(self, pages: Sequence[int], length: int, row: Sequence[RowCache]) -> None:
        """Fill an empty row with positions 0…length-1 from the pages. The row also gets columns for later positions."""
        columns = -(-(length + 1) // STEP) * STEP
        index = _index(np.pad(self.columns(pages, 0, length), (0, columns - length)))
        for cache, keys, values in zip(row, self.keys, self.values, strict=True):
            cache.keys = mx.take_along_axis(keys, index, axis=2)
            cache.values = mx.take_along_axis(values, index, axis=2)
            cache.offset = length

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy pages, source to target; all sources are read before any target is written."""
        pages = np.asarray(copies)[:, :, None] * self._page_size + np.arange(self._page_size)
        sources = _index(pages[:, 0].ravel())
        targets = _index(pages[:, 1].ravel())
        for side in (self.keys, self.values):
            stored = [mx.take_along_axis(x, sources, axis=2) for x in side]
            mx.eval(stored)  # MLX would copy the whole pool if a lazy array still read it
            side[:] = [mx.put_along_axis(x, targets, new, axis=2) for x, new in zip(side, stored, strict=True)]
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

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        self._windows = [shape.window for shape in shapes]
        self.pool = Pool(shapes, num_pages, page_size)
        self.groups: dict[int, ResidentGroup] = {}

    def write(self, writes: Sequence[Write], copies: Sequence[Sequence[int]]) -> None:
        for write in writes:
            self.pool.write(self.groups[write.group], write.spans)
        if copies:
            self.pool.copy(copies)

    def make(self, make: Make) -> None:
        rows = [self._row(source) for source in make.sources]
        layers = rows[0] if len(rows) == 1 else [BatchCache.of(list(layer)) for layer in zip(*rows, strict=True)]
        self.groups[make.group] = ResidentGroup(layers, [source.length for source in make.sources])

    def _row(self, source: Source) -> list[RowCache]:
        if source.group:
            return self.groups[source.group].row(source.row, source.length)
        row = [RowCache(window) for window in self._windows]
        if source.length:
            self.pool.read(source.pages, source.length, row)
        return row

    def keep(self, groups: Collection[int]) -> None:
        """Drop all groups except these."""
        self.groups = {number: group for number, group in self.groups.items() if number in groups}
