"""How attention over pages is cut into launches: numbers of the host only, no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

IDLE = 4  # times as many processors as programs
LONG = 1024  # positions
FEW = 4  # queries up to which a row is one tile, if these fit


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel. A tile is some queries of a row, times the heads that share a kv head."""

    kernel: Literal["decode", "extend"]
    queries: int  # of a tile, at most
    count: int  # of tiles
    tiles: tuple[tuple[int, int], ...] | None  # row and first query; None: each row with so few queries is one


def plan(
    query_lens: Sequence[int],
    contexts: Sequence[int],
    group: int,
    kv_heads: int,
    lines: int,
    few: int,
    processors: int,
) -> list[Launch]:
    """The launches that cover all rows. `group` query heads share each of the `kv_heads`; a row of up to `few` queries
    is one tile, a tile of a longer row has `lines`. Of `contexts` only the order matters, and they may be upper bounds.
    """
    launches: list[Launch] = []
    short = [queries for queries in query_lens if queries <= few]
    if short:
        launches.append(Launch("decode", 1 << (max(short) - 1).bit_length(), len(query_lens), None))
    if len(short) < len(query_lens):
        queries = max(1, lines // group)
        lengths = list(zip(query_lens, contexts, strict=True))
        tiles = [(row, first) for row, (own, _) in enumerate(lengths) if own > few for first in range(0, own, queries)]
        # the longest start first
        tiles.sort(key=lambda tile: lengths[tile[0]][0] - lengths[tile[0]][1] - tile[1])
        # merging costs more than it saves, unless most of the device would be idle for long
        idle = len(tiles) * kv_heads * IDLE <= processors and max(contexts) >= LONG
        kernel: Literal["decode", "extend"] = "decode" if idle else "extend"
        launches.append(Launch(kernel, queries, len(tiles), tuple(tiles)))
    return launches
