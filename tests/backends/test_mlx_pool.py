"""The pages that sequences share: every position where its page says, whichever way it is copied."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from localllm.backends.mlx.caches import Group, LayerShape
from localllm.backends.mlx.pool import PIECES, Pool

PAGE = 4
SHAPES = [LayerShape(2, 3, 5, mx.float32, 0), LayerShape(1, 4, 4, mx.float32, 0)]


def filled(ends: list[int], padding: list[int]) -> Group:
    """Rows of which every number is another."""
    group = Group.empty(SHAPES, 40, len(ends))
    for held in (group.keys, group.values):
        held[:] = [mx.random.normal(x.shape) for x in held]
    group.end, group.padding = max(end + first for end, first in zip(ends, padding, strict=True)), padding
    return group


def in_order(pages: int) -> np.ndarray:
    return np.arange(1, pages + 1, dtype=np.int32)


SCATTERED = np.array([7, 3, 4, 19, 1, 11, 9, 2, 14, 6], np.int32)


@pytest.mark.parametrize("pages", [in_order(10), SCATTERED, in_order(10)[::-1].copy()], ids=["one", "some", "many"])
@pytest.mark.parametrize("end", [1, 4, 5, 37, 40])
def test_what_is_written_is_read(pages: np.ndarray, end: int) -> None:
    pool, group = Pool(SHAPES, 24, PAGE), filled([0, end], [0, 0])
    pool.write(group, [1], [pages], [0], [end])
    assert pool.changed
    found = pool.read(pages, end)
    assert (found.end, found.padding) == (end, [0])
    assert found.columns > end, "there is room for the next"
    for own, held in ((found.keys, group.keys), (found.values, group.values)):
        for one, other in zip(own, held, strict=True):
            assert mx.array_equal(one[:, :, :end], other[1:, :, :end])


def test_pieces_are_as_long_as_pages_lie_together() -> None:
    pool = Pool(SHAPES, 24, PAGE)
    assert pool.places(SCATTERED, 2, 15) == [slice(30, 32), slice(12, 20), slice(76, 79)]
    assert pool.places(in_order(10), 0, 40) == [slice(4, 44)]
    assert len(pool.places(SCATTERED, 0, 40)) > PIECES


@pytest.mark.parametrize("rows", [(2,), (1, 3), (1, 2, 3)])
def test_several_rows_are_written_from_where_each_begins(rows: tuple[int, ...]) -> None:
    pool, group = Pool(SHAPES, 24, PAGE), filled([0, 7, 13, 10], [13, 6, 0, 3])
    pages = {1: np.array([5, 2], np.int32), 2: np.array([9, 10, 12, 1], np.int32), 3: np.array([20, 3, 4], np.int32)}
    starts, ends = {1: 4, 2: 0, 3: 9}, {1: 7, 2: 13, 3: 10}
    expected = [np.array(x) for x in (*pool.keys, *pool.values)]
    starting, ending = [starts[row] for row in rows], [ends[row] for row in rows]
    pool.write(group, list(rows), [pages[row] for row in rows], starting, ending)
    for row in rows:
        for position in range(starts[row], ends[row]):
            place = pages[row][position // PAGE] * PAGE + position % PAGE
            for right, held in zip(expected, (*group.keys, *group.values), strict=True):
                right[0, :, place] = np.array(held[row, :, group.padding[row] + position])
    for found, right in zip((*pool.keys, *pool.values), expected, strict=True):
        assert np.array_equal(np.array(found), right)


def test_all_sources_are_read_before_any_target_is_written() -> None:
    pool = Pool(SHAPES, 6, PAGE)
    for held in (pool.keys, pool.values):
        held[:] = [mx.random.normal(x.shape) for x in held]
    expected = [np.array(x) for x in (*pool.keys, *pool.values)]
    before = [x.copy() for x in expected]
    copies = np.array([[1, 2], [2, 3], [5, 1]], np.int32)
    for source, target in copies.tolist():
        for own, old in zip(expected, before, strict=True):
            own[:, :, target * PAGE : target * PAGE + PAGE] = old[:, :, source * PAGE : source * PAGE + PAGE]
    pool.copy(copies)
    assert pool.changed
    for found, right in zip((*pool.keys, *pool.values), expected, strict=True):
        assert np.array_equal(np.array(found), right)
