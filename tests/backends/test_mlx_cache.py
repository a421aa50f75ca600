"""Groups and pages of MLX: every move keeps each position in its row and its page."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx

from localllm.backends.mlx.cache import Caches, LayerShape, Pool, ResidentGroup
from localllm.backends.mlx.plan import Make, Source, Span, Write

from .mlx_operations import operations

pytestmark = pytest.mark.real_otherdevice

PAGE = 4
SHAPES = [LayerShape(2, 3, 5, mx.float32, 0), LayerShape(1, 4, 4, mx.float32, 6)]
SCATTERED = [7, 3, 4, 19, 1, 11, 9, 2, 14, 6]


@pytest.fixture
def caches() -> Caches:
    return Caches(SHAPES, 24, PAGE)


def begin(caches: Caches, group: int, rows: int) -> None:
    caches.make(Make(group, [Source(0, 0, 0, [])] * rows))


def gather(caches: Caches, group: int, *rows: tuple[int, int, int]) -> None:
    """A group of rows of others: group, row and length of each."""
    caches.make(Make(group, [Source(length, source, row, []) for source, row, length in rows]))


def extend(group: ResidentGroup, new: int) -> None:
    """Add random keys and values, as a call of a model does."""
    rows = len(group.lengths)
    group.set_offsets()
    for layer, shape in zip(group.layers, SHAPES, strict=True):
        dims = (shape.key_dim, shape.value_dim)
        layer.update_and_fetch(*(mx.random.normal((rows, shape.kv_heads, new, dim)) for dim in dims))
    group.lengths = [length + new for length in group.lengths]


def rows_of(group: ResidentGroup) -> list[list[np.ndarray]]:
    """Each row's keys and values of each layer, [kv heads, positions, dim]."""
    actual = []
    for row, length in enumerate(group.lengths):
        stored = [(x, layer.size()) for layer in group.layers for x in (layer.keys, layer.values)]
        actual.append([np.array(x[row, :, end - length : end]) for x, end in stored])
    return actual


def same(one: list[np.ndarray], other: list[np.ndarray], length: int) -> bool:
    return all(np.array_equal(a[:, :length], b[:, :length]) for a, b in zip(one, other, strict=True))


def uneven(caches: Caches) -> ResidentGroup:
    """Group 9: rows of 37, 5 and 40 positions."""
    for number, length in ((1, 30), (2, 33), (3, 2)):
        begin(caches, number, 1)
        extend(caches.groups[number], length)
    gather(caches, 8, (1, 0, 30), (3, 0, 2))
    extend(caches.groups[8], 1)
    gather(caches, 9, (8, 0, 31), (8, 1, 3), (2, 0, 33))
    extend(caches.groups[9], 2)
    for step in range(4):
        extend(caches.groups[9], 1)
        assert caches.groups[9].lengths == [34 + step, 6 + step, 36 + step]
    return caches.groups[9]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 5, 37, 40])
def test_written_pages_are_read(caches: Caches, rows: int, length: int) -> None:
    begin(caches, 1, rows)
    extend(caches.groups[1], length)
    caches.write_pages([Write(1, [Span(rows - 1, length, 0, SCATTERED)])])
    assert caches.pool.changed
    caches.pool.settle()
    caches.make(Make(2, [Source(length, 0, 0, SCATTERED)]))
    [actual] = rows_of(caches.groups[2])
    assert same(actual, rows_of(caches.groups[1])[rows - 1], length)
    assert caches.groups[2].layers[0].keys.shape[2] > length, "room for the next position"


def test_rows_of_unequal_length_are_gathered_and_written(caches: Caches) -> None:
    group = uneven(caches)
    before = rows_of(group)
    spans = [Span(0, 37, 20, SCATTERED), Span(1, 9, 0, [20, 21, 22])]
    caches.write_pages([Write(9, spans)])
    pool = [np.array(x) for x in (caches.pool.keys[0], caches.pool.values[1])]
    for span in spans:
        columns = caches.pool.columns(span.pages, span.start, span.length)
        assert columns[0] == span.pages[span.start // PAGE] * PAGE + span.start % PAGE
        for stored, written in ((pool[0], before[span.row][0]), (pool[1], before[span.row][3])):
            assert np.array_equal(stored[0, :, columns], written[:, span.start : span.length].swapaxes(0, 1))
    gather(caches, 10, (9, 2, 39), (9, 1, 9))
    assert caches.groups[10].lengths == [39, 9]
    assert same(rows_of(caches.groups[10])[0], before[2], 39)
    assert same(rows_of(caches.groups[10])[1], before[1], 9)
    gather(caches, 11, (10, 1, 9))
    [alone] = rows_of(caches.groups[11])
    assert same(alone, before[1], 9)


def test_row_is_cut_to_its_first_positions(caches: Caches) -> None:
    begin(caches, 1, 1)
    extend(caches.groups[1], 20)
    [before] = rows_of(caches.groups[1])
    gather(caches, 2, (1, 0, 7))
    extend(caches.groups[2], 5)
    [actual] = rows_of(caches.groups[2])
    assert same(actual, before, 7)
    assert caches.groups[2].lengths == [12]


def test_offsets_do_not_depend_on_the_steps_before(caches: Caches) -> None:
    """A layer without rope never reads its offsets, so a sum over all steps would stay lazy and grow."""
    for layer in uneven(caches).layers:
        assert operations([layer.offset]) <= 2


def test_all_sources_are_read_before_any_target_is_written() -> None:
    pool = Pool(SHAPES, 6, PAGE)
    for side in (pool.keys, pool.values):
        side[:] = [mx.random.normal(x.shape) for x in side]
    expected = [np.array(x) for x in (*pool.keys, *pool.values)]
    before = [x.copy() for x in expected]
    copies = [(1, 2), (2, 3), (5, 1)]
    for source, target in copies:
        for array, old in zip(expected, before, strict=True):
            array[:, :, target * PAGE : target * PAGE + PAGE] = old[:, :, source * PAGE : source * PAGE + PAGE]
    pool.copy(copies)
    assert pool.changed
    for actual, right in zip((*pool.keys, *pool.values), expected, strict=True):
        assert np.array_equal(np.array(actual), right)


def test_keep_drops_other_groups(caches: Caches) -> None:
    uneven(caches)
    caches.keep({9, 77})
    assert list(caches.groups) == [9]
