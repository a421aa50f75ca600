"""Captured sizes: which are worth it, and which one a step fits. What a step is filled up with is its runner's own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def decode_sizes(most: int) -> tuple[int, ...]:
    """Rows of one token each that are worth a graph of their own, ascending, the last holding `most`. Padding adds at
    most 3 rows to up to 12, 7 to up to 256, 15 to up to 512, and 31 beyond."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(most, 512) + 32, 32)]
    return tuple(size for size, before in zip(sizes, [0, *sizes], strict=False) if before < most)


def token_sizes(most: int) -> tuple[int, ...]:
    """Tokens of a step that are worth a graph of their own, ascending, none above `most`: padding adds at most an
    eighth to more than 128. Up to 1,024 the sizes are SGLang's; beyond, they are as near each other as before."""
    steps = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1152, 2049, 128))
    return tuple(size for some in steps for size in some if size <= most)


def bucket(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds `size`; None if none does."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
