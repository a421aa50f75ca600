"""The pages that sequences share, and what is copied between them and the caches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from ...engine.batch import Ints
from .caches import STEP, Group, LayerShape

PIECES = 8  # that lie apart, and are copied piece by piece: one by one, positions take far longer


class Pool:
    """The pages: keys and values of each layer, [(pages + 1) * page_size, kv heads, dim]."""

    def __init__(self, shapes: Sequence[LayerShape], num_pages: int, page_size: int) -> None:
        places = (num_pages + 1) * page_size
        self.page_size = page_size
        self.keys = [mx.zeros((places, shape.kv_heads, shape.key_dim), shape.dtype) for shape in shapes]
        self.values = [mx.zeros((places, shape.kv_heads, shape.value_dim), shape.dtype) for shape in shapes]
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
        places = [self.places(*each) for each in zip(pages, starts, ends, strict=True)]
        if len(rows) == 1 and len(places[0]) == 1:
            [[place]], [row], [first] = places, rows, firsts
            for own, held in self._beside(group):
                own[place] = held[row, :, first + starts[0] : first + ends[0]].swapaxes(0, 1)
        else:
            spans = [
                np.arange(first + start, first + end) for first, start, end in zip(firsts, starts, ends, strict=True)
            ]
            columns = mx.array(np.concatenate(spans).astype("u4"))
            owners = mx.array(np.repeat(rows, [len(span) for span in spans]).astype("u4"))
            targets = mx.array(np.concatenate([np.r_[tuple(each)] for each in places]).astype("u4"))
            for own, held in self._beside(group):
                own[targets] = held[owners, :, columns]
        self.changed = True

    def _beside(self, group: Group) -> Iterator[tuple[mx.array, mx.array]]:
        return zip([*self.keys, *self.values], [*group.keys, *group.values], strict=True)

    def read(self, pages: Ints, end: int) -> Group:
        """A row with positions 0…end-1, and room for more."""
        places, room = self.places(pages, 0, end), -(-(end + 1) // STEP) * STEP
        one_by_one = mx.array(np.r_[tuple(places)].astype("u4")) if len(places) > PIECES else None

        def held(x: mx.array) -> mx.array:
            found = mx.concatenate([x[piece] for piece in places]) if one_by_one is None else x[one_by_one]
            return mx.pad(found.swapaxes(0, 1)[None], [(0, 0), (0, 0), (0, room - end), (0, 0)])

        return Group([held(x) for x in self.keys], [held(x) for x in self.values], end, [0])

    def copy(self, copies: Ints) -> None:
        sources, targets = (
            mx.array((pages[:, None] * self.page_size + np.arange(self.page_size)).ravel().astype("u4"))
            for pages in copies.T
        )
        for held in (self.keys, self.values):
            for own in held:
                own[targets] = own[sources]
        self.changed = True
