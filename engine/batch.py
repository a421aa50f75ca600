"""One step as numpy arrays: everything that crosses the seam from the engine to a backend."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Want(IntEnum):
    """The result that a row must return. A drawn token or a hidden state is called a sample."""

    NOTHING = 0  # no sample: a prefill chunk that is not the last one of its prompt
    TOKEN = 1  # the next token, and one more token for each draft
    HIDDEN = 2  # the hidden state of the row's last token, for embeddings


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Sampling parameters, one value per sample (see Batch). Samples that draw no token have neutral values."""

    temperature: NDArray[np.float32]  # [samples]
    top_k: Ints  # [samples]; 0: off
    top_p: NDArray[np.float32]  # [samples]
    min_p: NDArray[np.float32]  # [samples]
    repetition_penalty: NDArray[np.float32]  # [samples]
    presence_penalty: NDArray[np.float32]  # [samples]
    frequency_penalty: NDArray[np.float32]  # [samples]
    seed: NDArray[np.uint64]  # [samples]
    draw: Ints  # [samples] position of the drawn token, which selects its random numbers
    logprobs: Ints  # [samples] number of likeliest tokens to list; -1: no log-probabilities
    bias_samples: Ints  # [biases] index of the sample; one element for each logit_bias entry of each sample
    bias_tokens: Ints  # [biases]
    bias_values: NDArray[np.float32]  # [biases]
    history_samples: Ints  # [pairs] index of the sample; a pair: a sample with penalties, a token before it
    history_tokens: Ints  # [pairs] the token; the pairs of one sample have different tokens
    history_prompt: Ints  # [pairs] occurrences of the token in the prompt
    history_output: Ints  # [pairs] occurrences of the token in the output, including the drafts before the drawn token


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Row r has the tokens row_starts[r]…row_starts[r + 1] - 1, in order of position.

    Pages: in cache group g the KV of the token at position p goes to page `page_tables[g][r, p // page_size]`, offset
    `p % page_size`. The token reads positions 0…p of its row, or the last `window` of them. Entries of these pages
    after the row's last position are stale.

    States: slot `states[r]` has the recurrent state after the position before the row's first one, and takes the state
    after the row's last position. A row that begins at position 0 begins with the empty state.

    Drafts: the last `drafts[r]` tokens of a row are proposals. The row draws a token after the token before the drafts
    and after each draft, 1 + drafts[r] tokens in all. It returns them up to and including the first that differs from
    the draft at its position. A row with drafts wants a token and does not carry.

    Copies: the step reads the sources of all page copies before it writes any target. The same holds for state copies.
    All targets differ.

    Freed pages: their KV is not read again, except by the copies of this step. Only a runner whose spec has `max_paths`
    gets them, each as (page, replacement). A replacement is a page with the same KV: sequences that had the page have
    the replacement from now on. 0: no replacement. The order is that of the events: a replacement may be freed later.
    The first batch of an engine lists all pages.

    Samples are drawn tokens and hidden states: rows that want a token have 1 + drafts samples, rows that want hidden
    states one, other rows none. They are numbered in order of rows and positions.
    """

    tokens: Ints  # [tokens]; 0 for a token that the device must take from the previous step (see `carry`)
    positions: Ints  # [tokens]
    row_starts: Ints  # [rows + 1]
    drafts: Ints  # [rows]
    page_tables: tuple[Ints, ...]  # for each cache group [rows, pages of the longest row]; 0: no page
    states: Ints  # [rows] state slot; -1: the runner has no states
    adapters: Ints  # [rows] adapter slot; 0: the base model
    adapter_scales: NDArray[np.float32]  # [rows] factor that multiplies the adapter's contribution
    carry: Ints  # [rows] row of the previous step that draws this row's last token; -1: `tokens` has it
    wants: NDArray[np.uint8]  # [rows] values of Want
    sampling: SampleSettings
    mask_samples: Ints  # [masked samples] index of the sample
    masks: NDArray[np.uint32]  # [masked samples, ceil(vocab / 32)], bit t % 32 of word t // 32: token t is allowed
    page_copies: tuple[Ints, ...]  # for each cache group [copies, 2]: pages (source, target) to copy before the step
    state_copies: Ints  # [copies, 2] state slots or snapshots (source, target) to copy before the step
    freed_pages: tuple[Ints, ...] = ()  # for each cache group [pages, 2]: (page, replacement), see above

    @property
    def num_rows(self) -> int:
        return len(self.row_starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def context_lens(self) -> Ints:
        """[rows] number of positions that each row has in the cache after this step, drafts included."""
        return self.positions[self.row_starts[1:] - 1] + np.int32(1)

    @property
    def sample_starts(self) -> Ints:
        """[rows + 1] offsets: row r has the samples sample_starts[r]…sample_starts[r + 1] - 1."""
        starts = np.zeros(len(self.wants) + 1, np.int32)
        ((self.wants != Want.NOTHING) + self.drafts).cumsum(out=starts[1:])
        return starts

    @property
    def sample_tokens(self) -> Ints:
        """[samples] for each sample, the index in `tokens` of the token before it, whose logits it needs."""
        starts = self.sample_starts
        counts = np.diff(starts)
        first = self.row_starts[1:] - counts - starts[:-1]
        return np.repeat(first, counts) + np.arange(starts[-1], dtype=np.int32)
