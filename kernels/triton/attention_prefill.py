"""Prefill attention in Triton: rows with many queries, over the cached prefix and the new tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_blocks import LOG2_E, ROWS, attend_blocks


@triton.jit(do_not_specialize=["table_row", "window"], do_not_specialize_on_alignment=ROWS)
def prefill(
    out, query, keys, values, sinks, tiles, row_starts, context_lens, page_table,
    query_token, query_head, key_page, key_slot, key_head, value_page, value_slot, value_head, out_token, table_row,
    scale, soft_cap, window,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_E: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Grid: kv heads, tiles. tiles [tiles, 2] int32 have the row and the first query of each tile. The lines of a tile
    are up to QUERIES queries times the GROUP heads that share a kv head, padded to BLOCK_M."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(row_starts + row)
    queries = tl.load(row_starts + row + 1) - start
    before = tl.load(context_lens + row) - queries + first  # positions before the tile's first query
    count = tl.minimum(queries - first, QUERIES)
    end = before + count
    line = tl.arange(0, BLOCK_M)
    query_index = line // GROUP
    live = query_index < count
    position = tl.where(live, before + query_index, end - 1)
    head = kv_head * GROUP + line % GROUP
    column = tl.arange(0, BLOCK_D)
    token = (start + first).to(tl.int64) + query_index
    inside = live[:, None] & (column < DIM)[None, :]
    from_query = query + (token * query_token + head * query_head)[:, None]
    q = tl.load(from_query + column[None, :], mask=inside, other=0.0)
    q_extra = q
    if EXTRA > 0:
        extra_column = tl.arange(0, BLOCK_E)
        present = live[:, None] & (extra_column < EXTRA)[None, :]
        q_extra = tl.load(from_query + extra_column[None, :] - EXTRA, mask=present, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table = page_table + row.to(tl.int64) * table_row
    keys += kv_head * key_head
    values += kv_head * value_head
    low = 0
    if WINDOW:
        low = tl.maximum(before - window + 1, 0) // BLOCK_N * BLOCK_N
    else:  # all queries of the tile see the positions before `low`, so these need no mask
        low = (before + 1) // BLOCK_N * BLOCK_N
        acc, peak, total = attend_blocks(
            acc, peak, total, q, q_extra, keys, values, table, 0, low, position, scale, soft_cap, window,
            key_page, key_slot, value_page, value_slot,
            PAGE_SIZE, DIM, BLOCK_N, BLOCK_D, EXTRA, BLOCK_E, False, WINDOW, CAP, FP8,
        )  # fmt: skip
    acc, peak, total = attend_blocks(
        acc, peak, total, q, q_extra, keys, values, table, low, end, position, scale, soft_cap, window,
        key_page, key_slot, value_page, value_slot,
        PAGE_SIZE, DIM, BLOCK_N, BLOCK_D, EXTRA, BLOCK_E, True, WINDOW, CAP, FP8,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
        total += tl.exp2(sink - peak)
    result = acc / tl.where(live, total, 1.0)[:, None]
    to = out + (token * out_token + head * DIM)[:, None] + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)
