"""Plans the launches of paged attention from the lengths of the rows, on the host and without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

IDLE = 4  # a launch with IDLE times fewer programs than the device has processors leaves it mostly idle
LONG = 1024  # positions of a context from which splitting it is worth the merge
SHORT_QUERIES = 4  # most queries of a row that is one tile, if the shared memory is large enough


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel. A tile is a few queries of a row times the query heads that share a kv head."""

    kernel: Literal["decode", "extend"]
    queries: int  # most queries of a tile
    count: int  # of tiles
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

    `group` query heads share each of the `kv_heads`. A row of up to `short_queries` queries is one tile; tiles of
    longer rows have `lines` lines. `contexts` may be upper bounds.
    """
    launches: list[Launch] = []
    short = [queries for queries in query_lens if queries <= short_queries]
    if short:
        launches.append(Launch("decode", 1 << (max(short) - 1).bit_length(), len(query_lens), None))
    if len(short) < len(query_lens):
        queries = max(1, lines // group)
        lengths = list(zip(query_lens, contexts, strict=True))
        tiles = [
            (row, first)
            for row, (row_queries, _) in enumerate(lengths)
            if row_queries > short_queries
            for first in range(0, row_queries, queries)
        ]
        # Tiles with the most positions start first.
        tiles.sort(key=lambda tile: lengths[tile[0]][0] - lengths[tile[0]][1] - tile[1])
        # Splitting and merging is only faster if most of the device would be idle, and the contexts are long.
        idle = len(tiles) * kv_heads * IDLE <= processors and max(contexts) >= LONG
        kernel: Literal["decode", "extend"] = "decode" if idle else "extend"
        launches.append(Launch(kernel, queries, len(tiles), tuple(tiles)))
    return launches
