"""Device functions that both attention kernels share: attention over a range of a row's cache, and the merge."""

from __future__ import annotations

import triton
import triton.language as tl

# The addresses of these arguments depend on the numbers of rows and tokens. If Triton specialised on their alignment,
# it would compile another kernel at run time.
ROWS = ["tiles", "row_starts", "context_lens", "page_table"]
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def floats(loaded, LIKE: tl.constexpr, FP8: tl.constexpr):
    """Values of the cache converted to LIKE, the queries' dtype.

    FP8 "bits" is for devices that do not convert float8_e4m3fn: the values are read as uint8. Their bits, shifted to
    the positions of a float16, are exactly the value / 256, also for subnormal values.
    """
    if FP8 == "bits":
        wide = loaded.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        loaded = bits.to(tl.float16, bitcast=True) * 256.0
    return loaded.to(LIKE)


@triton.jit
def read_keys_and_values(
    keys, values, inside, column, DIM: tl.constexpr, BLOCK_D: tl.constexpr, LATENT: tl.constexpr, MASKED: tl.constexpr
):
    """Keys and values of positions, each [positions, BLOCK_D], at the pointers `keys` and `values`. LATENT: the values
    are the keys. With MASKED, zeros replace values of positions that are not `inside`: they may be NaN, and NaN * 0 is
    NaN."""
    if MASKED:
        read = inside[:, None] & (column < DIM)[None, :]
        key = tl.load(keys, mask=read, other=0.0)
        value = key if LATENT else tl.load(values, mask=read, other=0.0)
    elif DIM < BLOCK_D:
        key = tl.load(keys, mask=(column < DIM)[None, :], other=0.0)
        value = key if LATENT else tl.load(values, mask=(column < DIM)[None, :], other=0.0)
    else:
        key = tl.load(keys)
        value = key if LATENT else tl.load(values)
    return key, value


@triton.jit
def attend_blocks(
    acc, peak, total, q, q_extra, keys, values, table, begin, end, position, scale, soft_cap, window,
    key_page, key_slot, value_page, value_slot,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr, BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein, 2018), in base 2, over the positions [begin, end) of the cache.

    Without MASKED, every query sees all these positions, and their number is a multiple of BLOCK_N. With EXTRA, the
    cache is latent: the keys have EXTRA more columns before `keys`, which q_extra [BLOCK_M, BLOCK_E] multiplies, and
    their other columns are the values.
    """
    column = tl.arange(0, BLOCK_D)
    for first in tl.range(begin, end, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        inside = place < end
        if MASKED:
            page = tl.load(table + place // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + place // PAGE_SIZE).to(tl.int64)
        slot = place % PAGE_SIZE
        key_pointers = keys + (page * key_page + slot * key_slot)[:, None] + column[None, :]
        value_pointers = values + (page * value_page + slot * value_slot)[:, None] + column[None, :]
        key, value = read_keys_and_values(key_pointers, value_pointers, inside, column, DIM, BLOCK_D, EXTRA > 0, MASKED)
        scores = tl.dot(q, tl.trans(floats(key, q.dtype, FP8)), input_precision="ieee")
        if EXTRA > 0:
            before = tl.arange(0, BLOCK_E)
            extra_pointers = keys + (page * key_page + slot * key_slot)[:, None] + before[None, :] - EXTRA
            present = inside[:, None] & (before < EXTRA)[None, :]
            extra = tl.load(extra_pointers, mask=present, other=0.0)
            scores = tl.dot(q_extra, tl.trans(extra), scores, input_precision="ieee")
        if CAP:  # tanh x = 2 sigmoid(2 x) - 1
            scores = (2.0 * tl.sigmoid(scores * (2.0 * scale / soft_cap)) - 1.0) * (soft_cap * LOG2_E)
        else:
            scores = scores * (scale * LOG2_E)
        if MASKED:
            visible = place[None, :] <= position[:, None]
            if WINDOW:
                visible &= place[None, :] > (position - window)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(peak - level)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), floats(value, q.dtype, FP8), acc * shrink[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def merge_lines(
    out, sinks, partial, stats, base, apart, count, line, live, token, kv_head, out_token,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge `count` partial results of a tile, PARTS at a time, and write the outputs of some lines of the tile.

    A line is one query of one head; `line` [lines] has the indices of the lines. In partial [places, TILE, DIM] and in
    stats [places, 2, TILE] (peak and total of each softmax), result 0 of the tile has index 2 * base + 1, and
    result i > 0 has index 2 * (base + i * apart).
    """
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + line % GROUP
    level = tl.full(line.shape, float("-inf"), tl.float32)
    if SINKS:
        level = tl.load(sinks + head, mask=live, other=0.0) * LOG2_E
    total = tl.full(line.shape, 1.0 if SINKS else 0.0, tl.float32)
    acc = tl.zeros([line.shape[0], BLOCK_D], tl.float32)
    for first in tl.range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        there = (part < count)[:, None] & live[None, :]  # [PARTS, lines]
        place = 2 * (base + part * apart) + (part == 0).to(tl.int32)
        stat = stats + place[:, None] * (2 * TILE) + line[None, :]
        peak = tl.load(stat, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stat + TILE, mask=there, other=0.0, cache_modifier=".cg")
        pointers = partial + (place[:, None] * TILE + line[None, :])[:, :, None] * DIM + column[None, None, :]
        read = there[:, :, None] & (column < DIM)[None, None, :]
        results = tl.load(pointers, mask=read, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(level, tl.max(peak, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peak - safe[None, :])
        shrink = tl.exp2(level - safe)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * results, 0)
        level = higher
    result = acc / tl.where(live, total, 1.0)[:, None]
    to = out + (token + line // GROUP)[:, None] * out_token + head[:, None] * DIM + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=live[:, None] & (column < DIM)[None, :])
