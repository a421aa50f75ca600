"""The pages that sequences share, and what is copied between them and the caches of rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ...engine.batch import Ints
from .caches import Group, LayerShape, in_steps

PIECES = 8  # that lie apart, and are copied piece by piece: one by one, positions take far longer


class Pool:
    """The pages: keys and values of each layer, [1, kv heads, (pages + 1) * page_size, dim] as those of one row.

    On CUDA a hit takes as long as the calls it makes: pages that lie together are read and written as they are.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        places = (num_pages + 1) * page_size
        self.page_size = page_size
        self.keys = [mx.zeros((1, shape.kv_heads, places, shape.key_dim), shape.dtype) for shape in shapes]
        self.values = [mx.zeros((1, shape.kv_heads, places, shape.value_dim), shape.dtype) for shape in shapes]
        self.changed = False

    def places(self, pages: Ints, start: int, end: int) -> list[slice]:
        """Where positions start…end-1 of a sequence lie: pieces, in order."""
        positions = np.arange(start, end)
        places = pages[positions // self.page_size] * self.page_size + positions % self.page_size
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        firsts, lasts = places[[0, *breaks]].tolist(), places[[*(breaks - 1), -1]].tolist()
        return [slice(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]

    def write(self, group: Group, rows: list[int], pages: list[Ints], starts: list[int], ends: list[int]) -> None:
        """Positions of some of a group's rows. As few calls as can be: on CUDA each new sequence of them costs time."""
        firsts = [group.padding[row] for row in rows]
        spans = [np.arange(first + start, first + end) for first, start, end in zip(firsts, starts, ends, strict=True)]
        pieces = [piece for each in zip(pages, starts, ends, strict=True) for piece in self.places(*each)]
        places = _along(np.r_[tuple(pieces)])
        columns = mx.array(np.concatenate(spans).astype("u4"))
        owners = mx.array(np.repeat(rows, [len(span) for span in spans]).astype("u4"))

        def new(x: mx.array) -> mx.array:
            if len(rows) > 1:
                return x[owners, :, columns].swapaxes(0, 1)[None]
            return x[rows[0] : rows[0] + 1, :, spans[0][0] : spans[0][-1] + 1]

        for own, held in ((self.keys, group.keys), (self.values, group.values)):
            for layer, x in enumerate(held):
                if len(pieces) == 1:
                    own[layer][:, :, pieces[0]] = new(x)
                else:
                    own[layer] = mx.put_along_axis(own[layer], places, new(x), axis=2)
        self.changed = True

    def read(self, pages: Ints, end: int) -> Group:
        """A row with positions 0…end-1, and room for more: its first write copies what is only looked at here."""
        pieces, room = self.places(pages, 0, end), in_steps(end + 1)
        if len(pieces) <= PIECES:  # the last with what lies behind it, whatever that is
            pieces[-1] = slice(pieces[-1].start, pieces[-1].stop + room - end)
        else:
            places = _along(np.pad(np.r_[tuple(pieces)], (0, room - end)))

        def held(x: mx.array) -> mx.array:
            if len(pieces) > PIECES:
                return mx.take_along_axis(x, places, axis=2)
            found = [x[:, :, piece] for piece in pieces]
            return mx.concatenate(found, axis=2) if len(found) > 1 else found[0]

        return Group([held(x) for x in self.keys], [held(x) for x in self.values], end, [0])

    def copy(self, copies: Ints) -> None:
        places = (copies[:, :, None] * self.page_size + np.arange(self.page_size)).reshape(len(copies), 2, -1)
        sources, targets = (_along(places[:, side].ravel()) for side in range(2))
        for own in (self.keys, self.values):
            found = [mx.take_along_axis(x, sources, axis=2) for x in own]
            mx.eval(found)  # what is still to be read cannot be written in place: all pages would be copied
            own[:] = [mx.put_along_axis(x, targets, new, axis=2) for x, new in zip(own, found, strict=True)]
        self.changed = True


def _along(places: Ints) -> mx.array:
    """As an index along the columns of [rows, heads, columns, dim]."""
    return mx.array(places.astype("u4"))[None, None, :, None]
