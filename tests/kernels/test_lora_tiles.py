"""The tiles of the LoRA products: tokens sorted by adapter and cut into chunks."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels.ops.lora import chunked, chunked_rows


def test_tiles_of_the_worked_example() -> None:
    """Rows of 2, 1 and 3 tokens with the adapters 1, 2 and 1, in tiles of at most 3 tokens (SGLang's example)."""
    slots = np.repeat(np.array([1, 2, 1], np.int32), [2, 1, 3])
    order, starts, tile_slots = chunked(slots, 3)
    assert order.tolist() == [0, 1, 3, 4, 5, 2]
    assert starts.tolist() == [0, 3, 5, 6]
    assert tile_slots.tolist() == [1, 1, 2]


def plain_tiles(slots: list[int], chunk: int) -> list[tuple[int, list[int]]]:
    """(slot, tokens) of each tile, with a plain loop."""
    tiles = []
    for slot in sorted(set(slots) - {0}):
        tokens = [token for token, each in enumerate(slots) if each == slot]
        tiles += [(slot, tokens[first : first + chunk]) for first in range(0, len(tokens), chunk)]
    return tiles


@pytest.mark.parametrize("seed", range(200))
def test_tiles_equal_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(1, 12))
    lens = rng.integers(1, int(rng.choice([2, 5, 70])), rng.integers(1, 20))
    slots = np.repeat(rng.integers(0, num_slots + 1, len(lens)).astype(np.int32), lens)
    chunk = int(rng.choice([1, 3, 16, 32]))
    order, starts, tile_slots = chunked(slots, chunk)
    tiles = [
        (int(slot), order[first:end].tolist())
        for slot, first, end in zip(tile_slots, starts[:-1], starts[1:], strict=True)
    ]
    assert tiles == plain_tiles(slots.tolist(), chunk)
    assert sorted(order.tolist()) == list(range(len(slots)))
    assert not slots[order[starts[-1] :]].any(), "tokens without an adapter are last"
    assert len(tiles) <= num_slots + len(slots) // chunk, "the number of tiles of a captured step"
    assert {array.dtype for array in (order, starts, tile_slots)} == {np.dtype(np.int32)}


@pytest.mark.parametrize("seed", range(50))
def test_tiles_of_one_row_each_are_never_fewer(seed: int) -> None:
    """Tiles of one row each cover the same tokens; no tile has tokens of two rows."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(1, int(rng.choice([2, 5, 70])), rng.integers(1, 20))
    slots = rng.integers(0, 4, len(lens)).astype(np.int32)
    row_of = np.repeat(np.arange(len(lens)), lens)
    order, starts, tile_slots = chunked_rows(slots, lens, 16)
    tokens = []
    for slot, first, end in zip(tile_slots, starts[:-1], starts[1:], strict=True):
        (row,) = set(row_of[order[first:end]])
        assert slots[row] == slot
        assert 1 <= end - first <= 16
        tokens += order[first:end].tolist()
    assert sorted(tokens) == np.repeat(slots, lens).nonzero()[0].tolist()
    joined = chunked(np.repeat(slots, lens), 16)[2]
    assert len(joined) <= len(tile_slots) <= len(lens) + len(order) // 16
