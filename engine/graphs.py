"""Bucket sizes for captured graphs, and the smallest bucket that fits a step. The runner pads the step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

TOKEN_SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1152, 2049, 128),
)


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Bucket sizes of decode steps in rows, ascending; the last one fits `max_rows` rows. Padding adds at most 3 rows
    up to 12 rows, 7 up to 256, 15 up to 512, and 31 above."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(max_rows, 512) + 32, 32))
    return sizes[: bisect_left(sizes, max_rows) + 1]


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Bucket sizes of other steps in tokens, ascending, none above `max_tokens`. Padding adds at most 1/8 above 128
    tokens. The sizes up to 1,024 are those of SGLang; the larger sizes keep the relative distance."""
    return TOKEN_SIZES[: bisect_right(TOKEN_SIZES, max_tokens)]


def bucket(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that is at least `size`; None if all are smaller."""
    index = bisect_left(sizes, size)
    if index == len(sizes):
        return None
    return sizes[index]
