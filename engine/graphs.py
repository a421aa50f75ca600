"""Bucket sizes for captured graphs, and the smallest bucket that fits a step. The runner pads the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def decode_sizes(most: int) -> tuple[int, ...]:
    """Bucket sizes of decode steps in rows, ascending; the last one fits `most` rows. Padding adds at most 3 rows up to
    12 rows, 7 up to 256, 15 up to 512, and 31 above."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(most, 512) + 32, 32)]
    return tuple(size for size, before in zip(sizes, [0, *sizes], strict=False) if before < most)


def token_sizes(most: int) -> tuple[int, ...]:
    """Bucket sizes of other steps in tokens, ascending, none above `most`. Padding adds at most 1/8 above 128 tokens.
    The sizes up to 1,024 are those of SGLang; the larger ones keep the relative distance."""
    steps = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1152, 2049, 128))
    return tuple(size for sizes in steps for size in sizes if size <= most)


def bucket(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that is at least `size`; None if there is none."""
    index = bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
