"""Plans the launches of paged attention from the lengths of the rows, on the host and without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Long rows are split over their contexts if their tiles need at most 1 / IDLE of the device's processors, and a context
# has at least LONG positions. Otherwise the merge takes longer than the split saves.
IDLE = 4
LONG = 1024
SHORT_QUERIES = 4  # a row of up to this many queries is one tile, if the shared memory is large enough

Kernel = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel. A tile is a few queries of a row times the query heads that share a kv head."""

    kernel: Kernel
    queries: int  # largest number of queries of a tile
    count: int  # number of tiles
    tiles: tuple[tuple[int, int], ...] | None  # (row, first query); None: each row of up to `queries` queries is a tile


def plan(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    group: int,
    kv_heads: int,
    lines: int,
    short_queries: int,
    processors: int,
) -> list[Launch]:
    """The launches that cover all rows.

    `group` query heads share each of the `kv_heads`. A row of up to `short_queries` queries is one tile. Tiles of
    longer rows have `lines` lines; a line is one query of one head. `contexts` may be upper bounds.
    """
    launches: list[Launch] = []
    short = [queries for queries in query_lens if queries <= short_queries]
    if short:
        power_of_two = 1 << (max(short) - 1).bit_length()
        launches.append(Launch("decode", power_of_two, len(query_lens), None))
    if len(short) < len(query_lens):
        queries = max(1, lines // group)
        tiles = _long_tiles(query_lens, contexts, queries, short_queries)
        idle = len(tiles) * kv_heads * IDLE <= processors and max(contexts) >= LONG
        kernel: Kernel = "decode" if idle else "prefill"
        launches.append(Launch(kernel, queries, len(tiles), tiles))
    return launches


def _long_tiles(
    query_lens: Sequence[int], contexts: Sequence[int], queries: int, short_queries: int
) -> tuple[tuple[int, int], ...]:
    """(row, first query) of the tiles of all rows with more than `short_queries` queries; those with the most positions
    come first, because they take the longest."""

    def positions(tile: tuple[int, int]) -> int:
        row, first = tile
        return contexts[row] - query_lens[row] + first

    tiles: list[tuple[int, int]] = []
    for row, row_queries in enumerate(query_lens):
        if row_queries > short_queries:
            tiles += [(row, first) for first in range(0, row_queries, queries)]
    return tuple(sorted(tiles, key=positions, reverse=True))
