"""Captured shapes: which one a batch fits, and how it is filled up. Arithmetic on Batch, no device.

Padding adds inert rows: they want nothing, belong to the base model, and every page of theirs is page 0, so the
tokens they hold (all 0) are written where nobody reads. Each has one token; the last takes all that are left over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, SamplingRows, Want

Number = TypeVar("Number", bound=np.generic)
PER_ROW = tuple(field.name for field in fields(SamplingRows) if not field.name.startswith(("bias_", "history_")))
NEUTRAL = {"top_p": 1.0, "repetition_penalty": 1.0, "logprobs": -1}


class Shape(NamedTuple):
    rows: int
    tokens: int


def decode_sizes(most: int) -> tuple[int, ...]:
    """Rows of one token each that are worth a graph of their own, ascending, the last holding `most`: padding wastes
    at most a third of up to 12 rows, half of 16 to 24, and then less and less."""
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max(most, 512) + 32, 32)]
    return tuple(size for size, before in zip(sizes, [0, *sizes], strict=False) if before < most)


def token_sizes(most: int) -> tuple[int, ...]:
    """Tokens of a step that are worth a graph of their own, ascending, none above `most`: padding wastes at most 6 %
    of more than 64 (the sizes are SGLang's)."""
    steps = (range(4, 33, 4), range(48, 257, 16), range(288, 513, 32), range(576, 1025, 64), range(1280, 4097, 256))
    return tuple(size for some in steps for size in some if size <= most)


def bucket(size: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending sizes that holds `size`; None if none does."""
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None


def choose_shape(batch: Batch, rows: Sequence[int], tokens: Sequence[int]) -> Shape | None:
    """The smallest captured shape that the batch can be padded to; None: it has to run without a graph.

    `rows` and `tokens` are RunnerSpec.graph_rows and graph_tokens.
    """
    for more_rows in rows[bisect_left(rows, batch.num_rows) :]:
        extra = more_rows - batch.num_rows
        more_tokens = bucket(batch.num_tokens + extra, tokens)
        if more_tokens is not None and (extra or more_tokens == batch.num_tokens):
            return Shape(more_rows, more_tokens)
    return None


def pad(batch: Batch, rows: int, tokens: int, page_size: int = 1) -> Batch:
    """The batch with inert rows and tokens up to the given numbers; its own rows come first, unchanged.

    Raises ValueError for a shape that does not hold it: an inert row needs a token, and tokens need an inert row.
    `page_size` says how wide the page table must be for the longest inert row.
    """
    extra, spare = rows - batch.num_rows, tokens - batch.num_tokens
    if extra < 0 or spare < extra or (spare and not extra):
        raise ValueError(
            f"a batch of {batch.num_rows} rows and {batch.num_tokens} tokens does not fit {rows} rows, {tokens} tokens"
        )
    if not extra:
        return batch
    last = spare - extra + 1  # tokens of the last inert row
    width = max(batch.page_table.shape[1], -(-last // page_size)) if batch.page_table.shape[1] else 0
    page_table = np.zeros((rows, width), np.int32)
    page_table[: batch.num_rows, : batch.page_table.shape[1]] = batch.page_table
    inert_positions = np.concatenate([np.zeros(extra - 1, np.int32), np.arange(last, dtype=np.int32)])
    inert_starts = batch.num_tokens + np.arange(1, extra + 1, dtype=np.int32)
    inert_starts[-1] = tokens
    return replace(
        batch,
        tokens=_filled(batch.tokens, tokens, 0),
        positions=np.concatenate([batch.positions, inert_positions]),
        row_starts=np.concatenate([batch.row_starts, inert_starts]),
        page_table=page_table,
        slots=_filled(batch.slots, rows, -1),
        adapters=_filled(batch.adapters, rows, 0),
        carry=_filled(batch.carry, rows, -1),
        wants=_filled(batch.wants, rows, Want.NOTHING),
        sampling=replace(
            batch.sampling,
            **{name: _filled(getattr(batch.sampling, name), rows, NEUTRAL.get(name, 0)) for name in PER_ROW},
        ),
    )


def _filled(array: NDArray[Number], length: int, value: float) -> NDArray[Number]:
    """`array` and then `value` up to `length`."""
    result = np.full(length, value, array.dtype)
    result[: len(array)] = array
    return result
