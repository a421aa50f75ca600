"""Rows: each sequence's share of a step, and how they become one Batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .batch import Batch, Ints, SamplingRows, Want
from .request import Sampling

if TYPE_CHECKING:
    from .kv import Lease
    from .request import Sequence

NEUTRAL = Sampling()
NO_INTS: Ints = np.zeros(0, np.int32)
NO_COPIES: Ints = np.zeros((0, 2), np.int32)
NO_MASKS: NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
SMALLEST_TOP_P = float(np.finfo(np.float32).tiny)  # below it float32 rounds to 0, a nucleus without tokens
SMALLEST_TEMPERATURE = 1e-5  # below it float32 logits overflow when divided; the draw is greedy long before


@dataclass(slots=True, eq=False)
class Row:
    """Positions start…end-1 of a sequence are computed in this step."""

    sequence: Sequence
    lease: Lease
    start: int
    end: int
    carry: int  # row of the step before that draws the last of these tokens; -1: all are known
    wants_token: bool
    mask: NDArray[np.uint32] | None = None


class BatchBuilder:
    """Turns rows into arrays that nobody changes later; what equals the step before is not built again."""

    def __init__(self) -> None:
        self._drawing: list[Sequence | None] = []  # the sequence of each row that wants a token
        self._sampling = _parameters(self._drawing)
        self._wants = _wants(self._drawing)
        self._held: list[tuple[Lease, int]] = []  # each row's lease, and how often its pages had changed
        self._table: Ints = np.zeros((0, 0), np.int32)  # the pages of these
        self._slots = self._adapters = NO_INTS  # of these

    def build(self, rows: list[Row], copies: list[tuple[int, int]]) -> Batch:
        starts, ends = np.array([row.start for row in rows], np.int32), np.array([row.end for row in rows], np.int32)
        counts = ends - starts
        row_starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=row_starts[1:])
        tokens: list[int] = []
        for row in rows:
            known = row.sequence.tokens
            tokens += (known[row.start],) if row.end - row.start == 1 and row.carry < 0 else known[row.start : row.end]
            if row.carry >= 0:
                tokens.append(0)
        positions = starts
        if len(tokens) > len(rows):
            positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
        masked = [index for index, row in enumerate(rows) if row.mask is not None]
        self._look_up(rows)
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            row_starts=row_starts,
            page_table=self._table,
            slots=self._slots,
            adapters=self._adapters,
            carry=np.array([row.carry for row in rows], np.int32),
            wants=self._wants,
            sampling=self._sampling_rows(ends),
            mask_rows=np.array(masked, np.int32) if masked else NO_INTS,
            masks=np.stack([row.mask for row in rows if row.mask is not None]) if masked else NO_MASKS,
            copies=np.array(copies, np.int32) if copies else NO_COPIES,
        )

    def _look_up(self, rows: list[Row]) -> None:
        """What sequences and leases tell, where that is no longer what they told for the step before."""
        drawing = [row.sequence if row.wants_token else None for row in rows]
        if drawing != self._drawing:
            self._drawing, self._sampling, self._wants = drawing, _parameters(drawing), _wants(drawing)
        held = [(row.lease, row.lease.changes) for row in rows]
        if held != self._held:
            self._table, self._held = self._page_table(held), held
            self._slots = np.array([row.lease.slot for row in rows], np.int32)
            self._adapters = np.array([row.sequence.adapter_slot for row in rows], np.int32)

    def _page_table(self, held: list[tuple[Lease, int]]) -> Ints:
        """A new one, for which only what changed is looked up."""
        table = np.zeros((len(held), max([len(lease.pages) for lease, _ in held])), np.int32)
        alike = len(held) == len(self._held)
        if alike:
            width = min(table.shape[1], self._table.shape[1])
            table[:, :width] = self._table[:, :width]
        for index, now in enumerate(held):
            if not alike or now != self._held[index]:
                pages = now[0].pages
                table[index, : len(pages)] = pages
                table[index, len(pages) :] = 0
        return table

    def _sampling_rows(self, positions: Ints) -> SamplingRows:
        said = {
            index: sequence.history.table
            for index, sequence in enumerate(self._drawing)
            if sequence is not None and sequence.history is not None
        }
        if not said:
            return replace(self._sampling, draw=positions)
        table = np.concatenate(list(said.values()), axis=1)
        owners = np.repeat(np.array(list(said), np.int32), [part.shape[1] for part in said.values()])
        return replace(
            self._sampling,
            draw=positions,
            history_rows=owners,
            history_tokens=table[0],
            history_prompt=table[1],
            history_output=table[2],
        )


def _wants(drawing: list[Sequence | None]) -> NDArray[np.uint8]:
    return np.array([Want.NOTHING if sequence is None else Want.TOKEN for sequence in drawing], np.uint8)


def _parameters(drawing: list[Sequence | None]) -> SamplingRows:
    """What does not change while the same sequences draw; neutral where there is none."""
    asked = [NEUTRAL if sequence is None else sequence.request.sampling for sequence in drawing]
    biases = [(index, *bias) for index, sampling in enumerate(asked) for bias in sampling.logit_bias]
    temperatures = [s.temperature if s.temperature >= SMALLEST_TEMPERATURE else 0.0 for s in asked]
    return SamplingRows(
        temperature=np.array(temperatures, np.float32),
        top_k=np.array([min(s.top_k, 2**31 - 1) for s in asked], np.int32),
        top_p=np.array([max(s.top_p, SMALLEST_TOP_P) for s in asked], np.float32),
        min_p=np.array([s.min_p for s in asked], np.float32),
        repetition_penalty=np.array([s.repetition_penalty for s in asked], np.float32),
        presence_penalty=np.array([s.presence_penalty for s in asked], np.float32),
        frequency_penalty=np.array([s.frequency_penalty for s in asked], np.float32),
        seed=np.array([s.seed for s in asked], np.uint64),
        draw=NO_INTS,
        logprobs=np.array([-1 if s.logprobs is None else s.logprobs for s in asked], np.int32),
        bias_rows=np.array([index for index, _, _ in biases], np.int32),
        bias_tokens=np.array([token for _, token, _ in biases], np.int32),
        bias_values=np.array([value for _, _, value in biases], np.float32),
        history_rows=NO_INTS,
        history_tokens=NO_INTS,
        history_prompt=NO_INTS,
        history_output=NO_INTS,
    )
