"""Decode attention in Triton: few queries per row, limited by the memory bandwidth.

A tile is a few queries of one row times the query heads that share a kv head, so the cache is read once for all of
them. The blocks of the cache that all tiles read are divided evenly into chunks, whatever the lengths of the rows. The
number of chunks fills the device. The host does not need the lengths:

    blocks   | tile 0   |tile 1 |          tile 2            | tile 3  |
    chunks   |    0    |    1    |    2    |    3    |    4    |    5  |

A chunk is computed by `kv_heads` programs, which read neighbouring bytes at the same time. If several chunks share a
tile, the chunk that finishes last merges their partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_blocks import LOG2_E, ROWS, attend_blocks, merge_lines

SEARCH_TILES = tl.constexpr(128)  # tiles per iteration of the search in _find_tile


@triton.jit
def _measure_tile(
    tiles, row_starts, context_lens, tile, there, window,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(row, first token, queries, low, end, blocks) of a tile, or of a vector of tiles.

    The queries see the positions [low, end), which are `blocks` blocks. If the row has more than QUERIES queries and is
    not listed, `blocks` is 0.
    """
    row = tile
    if LISTED:
        row = tl.load(tiles + 2 * tile, mask=there, other=0)
    start = tl.load(row_starts + row, mask=there, other=0)
    queries = tl.load(row_starts + row + 1, mask=there, other=0) - start
    end = tl.load(context_lens + row, mask=there, other=0)
    if LISTED:
        first = tl.load(tiles + 2 * tile + 1, mask=there, other=0)
        left = queries - first
        queries = tl.minimum(left, QUERIES)
        start += first
        end -= left - queries
    low = end * 0
    if WINDOW:
        low = tl.maximum(end - queries - window + 1, 0) // BLOCK_N * BLOCK_N
    blocks = tl.where((queries > 0) & (queries <= QUERIES), tl.cdiv(end - low, BLOCK_N), 0)
    return row, start, queries, low, end, blocks


@triton.jit
def _find_tile(
    tiles, row_starts, context_lens, count, block, window,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, LISTED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(tile that contains block `block`, number of blocks of the tiles before it, number of blocks of all tiles)."""
    tile = 0
    passed = 0
    all_blocks = 0
    for first in tl.range(0, count, SEARCH_TILES):
        candidate = first + tl.arange(0, SEARCH_TILES)
        _, _, _, _, _, blocks = _measure_tile(
            tiles, row_starts, context_lens, candidate, candidate < count, window, QUERIES, BLOCK_N, LISTED, WINDOW
        )
        over = (all_blocks + tl.cumsum(blocks, 0) <= block) & (candidate < count)
        tile += tl.sum(over.to(tl.int32), 0)
        passed += tl.sum(tl.where(over, blocks, 0), 0)
        all_blocks += tl.sum(blocks, 0)
    return tile, passed, all_blocks


@triton.jit(do_not_specialize=["count", "chunks", "table_row", "window"], do_not_specialize_on_alignment=ROWS)
def decode(
    out, query, keys, values, sinks, tiles, row_starts, context_lens, page_table, partial, stats, counters,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, table_row,
    count, chunks, scale, soft_cap, window,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
    ALONE: tl.constexpr, LISTED: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid: kv heads, chunks. The blocks of BLOCK_N positions that the tiles read, tile after tile, are divided evenly
    into chunks.

    LISTED: tiles [count, 2] int32 has the row and the first query of each tile, which has up to QUERIES queries.
    Otherwise every row with up to QUERIES queries is a tile, and other rows are skipped. ALONE: there is one tile.

    partial [chunks, kv heads, 2, QUERIES * GROUP, DIM] and stats [chunks, kv heads, 2, 2, QUERIES * GROUP] (peak and
    total of each softmax) have two partial results of a chunk: one of a tile that began in an earlier chunk (index 0),
    and one of a tile that begins in this chunk (index 1). counters [count, kv heads] are zero before and after the
    launch. The merge reads PARTS partial results at a time, and STEP lines of each; a line is one query of one head.
    """
    TILE: tl.constexpr = QUERIES * GROUP
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    chunk = tl.program_id(1)
    tile = 0
    passed = 0  # blocks of the tiles before `tile`
    if ALONE:
        _, _, _, _, _, all_blocks = _measure_tile(
            tiles, row_starts, context_lens, 0, True, window, QUERIES, BLOCK_N, LISTED, WINDOW
        )
    else:
        _, _, all_blocks = _find_tile(
            tiles, row_starts, context_lens, count, 0, window, QUERIES, BLOCK_N, LISTED, WINDOW
        )
    share = tl.maximum(tl.cdiv(all_blocks, chunks), 1)
    block = chunk * share
    stop = tl.minimum(block + share, all_blocks)
    if not ALONE:
        tile, passed, _ = _find_tile(
            tiles, row_starts, context_lens, count, block, window, QUERIES, BLOCK_N, LISTED, WINDOW
        )
    line = tl.arange(0, BLOCK_M)
    query_index = line // GROUP
    head = kv_head * GROUP + line % GROUP
    column = tl.arange(0, BLOCK_D)
    keys += kv_head * key_head
    values += kv_head * value_head
    while block < stop:
        row, start, queries, low, end, blocks = _measure_tile(
            tiles, row_starts, context_lens, tile, True, window, QUERIES, BLOCK_N, LISTED, WINDOW
        )
        upto = tl.minimum(stop, passed + blocks)
        if block < upto:
            live = query_index < queries
            position = tl.where(live, end - queries + query_index, end - 1)
            token = start.to(tl.int64)
            inside = live[:, None] & (column < DIM)[None, :]
            from_query = ((token + query_index) * query_token + head * query_head)[:, None] + column[None, :]
            q = tl.load(query + from_query, mask=inside, other=0.0)
            q_extra = q
            if EXTRA > 0:
                before = tl.arange(0, BLOCK_E)
                present = live[:, None] & (before < EXTRA)[None, :]
                from_query = ((token + query_index) * query_token + head * query_head)[:, None] - EXTRA
                q_extra = tl.load(query + from_query + before[None, :], mask=present, other=0.0)
            acc, peak, total = attend_blocks(
                tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32),
                q, q_extra, keys, values, page_table + row.to(tl.int64) * table_row,
                low + (block - passed) * BLOCK_N, tl.minimum(low + (upto - passed) * BLOCK_N, end),
                position, scale, soft_cap, window, key_page, key_slot, value_page, value_slot,
                PAGE_SIZE, DIM, BLOCK_N, BLOCK_D, EXTRA, BLOCK_E, True, WINDOW, CAP, FP8,
            )  # fmt: skip
            begin = passed // share  # index of the chunk in which the tile begins
            parts = (passed + blocks - 1) // share - begin + 1
            if parts == 1:
                if SINKS:
                    sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
                    total += tl.exp2(sink - peak)
                result = acc / tl.where(live, total, 1.0)[:, None]
                to = out + ((token + query_index) * out_token + head * DIM)[:, None] + column[None, :]
                tl.store(to, result.to(out.dtype.element_ty), mask=inside)
            else:
                place = (chunk * kv_heads + kv_head) * 2 + (begin == chunk).to(tl.int32)
                tl.store(partial + (place * TILE + line)[:, None] * DIM + column[None, :], acc, mask=inside)
                tl.store(stats + place * (2 * TILE) + line, peak, mask=live)
                tl.store(stats + place * (2 * TILE) + TILE + line, total, mask=live)
                tl.debug_barrier()  # all threads have written their results before the counter is incremented
                counter = counters + tile * kv_heads + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                    tl.store(counter, 0)
                    for first_line in tl.range(0, queries * GROUP, STEP):
                        some = first_line + tl.arange(0, STEP)
                        merge_lines(
                            out, sinks, partial, stats, begin * kv_heads + kv_head, kv_heads,
                            parts, some, some < queries * GROUP, token, kv_head, out_token,
                            GROUP, TILE, DIM, BLOCK_D, PARTS, SINKS,
                        )  # fmt: skip
        block = upto
        passed += blocks
        tile += 1
