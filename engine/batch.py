"""One step's work: numpy arrays only, and all that crosses the seam between engine and backend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Want(IntEnum):
    """What a row must give back."""

    NOTHING = 0  # a prefill chunk that is not the last
    TOKEN = 1
    HIDDEN = 2  # the last hidden state, for embeddings


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of every row of the batch (rows that want no token hold neutral values)."""

    temperature: NDArray[np.float32]  # [rows]
    top_k: Ints  # [rows], 0 is off
    top_p: NDArray[np.float32]  # [rows]
    min_p: NDArray[np.float32]  # [rows]
    repetition_penalty: NDArray[np.float32]  # [rows]
    presence_penalty: NDArray[np.float32]  # [rows]
    frequency_penalty: NDArray[np.float32]  # [rows]
    seed: NDArray[np.uint64]  # [rows]
    draw: Ints  # [rows] position of the token to be drawn: the counter of the seeded draw
    logprobs: Ints  # [rows], -1: none, else how many of the likeliest
    bias_rows: Ints  # [biases] row, token and value of every logit_bias entry
    bias_tokens: Ints
    bias_values: NDArray[np.float32]
    history_rows: Ints  # [pairs] row, token, counts: the distinct tokens of rows with penalties
    history_tokens: Ints
    history_prompt: Ints  # how often it stands in the prompt
    history_output: Ints  # how often it was generated


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Row r owns tokens[row_starts[r]:row_starts[r + 1]], in order of position.

    KV of the token at position p goes to page `page_table[r, p // page_size]`, offset `p % page_size`; its
    context is positions 0…p of the same row. With slots instead of pages, `slots[r]` names the sequence's cache
    and everything in it from the row's first position on is stale.
    """

    tokens: Ints  # [tokens]; where a row carries, its last token is 0 and to be replaced
    positions: Ints  # [tokens]
    row_starts: Ints  # [rows + 1]
    page_table: Ints  # [rows, pages of the longest row]; unused entries are 0, page 0 is never handed out
    slots: Ints  # [rows], -1 where the cache has pages
    adapters: Ints  # [rows], 0 is the base model
    carry: Ints  # [rows]: row of the step before whose drawn token is this row's last token; -1: known
    wants: NDArray[np.uint8]  # [rows] of Want
    sampling: SamplingRows
    mask_rows: Ints  # [masked rows]
    masks: NDArray[np.uint32]  # [masked rows, ceil(vocab / 32)], bit t % 32 of word t // 32: token t is allowed
    copies: Ints  # [copies, 2] page copies (source, target), all read before any is written, before the step

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def context_lens(self) -> Ints:
        """[rows] positions in each row's cache after this step."""
        return self.positions[self.row_starts[1:] - 1] + np.int32(1)
