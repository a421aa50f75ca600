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
    """Bucket sizes of decode steps in rows, ascending; the last bucket fits `max_rows` rows. A step of up to 12 rows is
    padded by at most 3 rows; of up to 256 rows by 7; of up to 512 rows by 15; a larger step by 31."""
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(max_rows, 512) + 32, 32))
    return sizes[: bisect_left(sizes, max_rows) + 1]


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Bucket sizes of prefill and mixed steps in tokens, ascending, none above `max_tokens`. A step of more than 128
    tokens is padded by at most 1/8. The sizes up to 1,024 are those of SGLang."""
    return TOKEN_SIZES[: bisect_right(TOKEN_SIZES, max_tokens)]


def limited_sizes(
    rows: tuple[int, ...], tokens: tuple[int, ...], token_graphs: int, limit: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bucket sizes `rows` and `tokens`, thinned out until their graphs are at most `limit`: one for each size in
    rows, `token_graphs` for each size in tokens.

    Decode steps are the most frequent, so their sizes come first. Both keep their largest sizes, and sizes in even
    distances between these, which keeps the padding of all steps small.
    """
    rows = _thinned(rows, limit)
    return rows, _thinned(tokens, (limit - len(rows)) // token_graphs)


def _thinned(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """At most `count` of the ascending `sizes`, in even distances: the largest, and the smallest if count > 1."""
    if len(sizes) <= count:
        return sizes
    last = len(sizes) - 1
    steps = max(1, count - 1)
    return tuple(sizes[last - step * last // steps] for step in reversed(range(count)))


def bucket(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest element of `sizes` that is at least `size`; None if all are smaller. `sizes` is ascending."""
    index = bisect_left(sizes, size)
    if index == len(sizes):
        return None
    return sizes[index]
