"""Rows: the part of each sequence in a step, and their translation into one Batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .batch import AnswerSampling, Batch, Ints, Want

if TYPE_CHECKING:
    from .kv import Copies, Lease
    from .request import Sampling, Sequence

NO_INTS: Ints = np.zeros(0, np.int32)
NO_DRAFTS: list[int] = []  # no row of the step has drafts
NO_COPIES: Ints = np.zeros((0, 2), np.int32)
NO_MASKS: NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
SMALLEST_TOP_P = float(np.finfo(np.float32).tiny)  # below it float32 rounds to 0, a nucleus without tokens
SMALLEST_TEMPERATURE = 1e-5  # below it float32 logits overflow when divided; the draw is greedy long before


@dataclass(slots=True, eq=False)
class Row:
    """Positions start…end-1 of a sequence, and those of its drafts, are computed in this step."""

    sequence: Sequence
    lease: Lease
    start: int
    end: int
    carry: int  # row of the step before that draws the last of these tokens; -1: all are known
    wants_token: bool
    drafts: tuple[int, ...] = ()  # tokens at positions end…, to verify
    masks: tuple[NDArray[np.uint32], ...] = ()  # allowed tokens of each answer; empty: all


class BatchBuilder:
    """Turns rows into arrays that nobody changes later; arrays that equal those of the step before are used again."""

    def __init__(self) -> None:
        self._drawing: list[Sequence | None] = []  # the sequence of each row that wants a token
        self._draft_counts = NO_DRAFTS  # of each row
        self._answers = _Answers([], [])
        self._leases: list[tuple[Lease, int]] = []  # lease of each row, and number of changes to its pages
        self._tables: tuple[Ints, ...] = ()  # pages of these leases, per group
        self._states = NO_INTS  # of these leases
        self._adapters = NO_INTS  # of the same rows
        self._scales: NDArray[np.float32] = np.zeros(0, np.float32)

    def build(self, rows: list[Row], page_copies: Copies, state_copies: list[tuple[int, int]]) -> Batch:
        """`page_copies` per group and `state_copies`: (source, target), before the step."""
        starts = np.array([row.start for row in rows], np.int32)
        ends = np.array([row.end for row in rows], np.int32)
        special = [row for row in rows if row.drafts or row.masks]
        self._look_up(rows, [len(row.drafts) for row in rows] if special else NO_DRAFTS)
        answers = self._answers
        counts = ends - starts
        if self._draft_counts:
            counts += answers.drafts
        row_starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=row_starts[1:])
        tokens = _tokens(rows)
        positions = starts
        if len(tokens) > len(rows):
            positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
        mask_answers, masks = _masks(rows) if special else (NO_INTS, NO_MASKS)
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            row_starts=row_starts,
            drafts=answers.drafts,
            page_tables=self._tables,
            states=self._states,
            adapters=self._adapters,
            adapter_scales=self._scales,
            carry=np.array([row.carry for row in rows], np.int32),
            wants=answers.wants,
            sampling=answers.sampling(ends, rows),
            mask_answers=mask_answers,
            masks=masks,
            page_copies=tuple([np.array(pairs, np.int32) if pairs else NO_COPIES for pairs in page_copies]),
            state_copies=np.array(state_copies, np.int32) if state_copies else NO_COPIES,
        )

    def _look_up(self, rows: list[Row], draft_counts: list[int]) -> None:
        """Rebuild the arrays of sequences and leases that differ from those of the step before."""
        drawing = [row.sequence if row.wants_token else None for row in rows]
        if drawing != self._drawing or draft_counts != self._draft_counts:
            self._drawing = drawing
            self._draft_counts = draft_counts
            self._answers = _Answers(drawing, draft_counts)
        leases = [(row.lease, row.lease.changes) for row in rows]
        if leases == self._leases:
            return
        groups = len(rows[0].lease.pages)
        same_rows = [lease for lease, _ in leases] == [lease for lease, _ in self._leases]
        self._tables = tuple([self._page_table(group, leases, same_rows) for group in range(groups)])
        self._leases = leases
        if not same_rows:
            self._states = np.array([row.lease.state for row in rows], np.int32)
            self._adapters = np.array([row.sequence.adapter_slot for row in rows], np.int32)
            self._scales = np.array([row.sequence.request.adapter_scale for row in rows], np.float32)

    def _page_table(self, group: int, leases: list[tuple[Lease, int]], same_rows: bool) -> Ints:
        """A new table, in which only the rows of changed leases are written."""
        table = np.zeros((len(leases), max([len(lease.pages[group]) for lease, _ in leases])), np.int32)
        if same_rows:
            before = self._tables[group]
            width = min(table.shape[1], before.shape[1])
            table[:, :width] = before[:, :width]
        for index, entry in enumerate(leases):
            if not same_rows or entry != self._leases[index]:
                pages = entry[0].pages[group]
                table[index, : len(pages)] = pages
                table[index, len(pages) :] = 0
        return table


class _Answers:
    """Arrays that stay the same while the same sequences draw, with the same numbers of drafts."""

    def __init__(self, drawing: list[Sequence | None], draft_counts: list[int]) -> None:
        """Each row's sequence, None where it draws nothing, and each row's number of drafts (empty: no drafts)."""
        drafts = draft_counts or [0] * len(drawing)
        counts = [0 if sequence is None else 1 + more for sequence, more in zip(drawing, drafts, strict=True)]
        # (row, sequence, number of drafts of the row before the answer) of each answer
        places = [
            (row, sequence, offset)
            for row, sequence in enumerate(drawing)
            if sequence is not None
            for offset in range(counts[row])
        ]
        self._with_history = [
            (answer, row, sequence.history, offset)
            for answer, (row, sequence, offset) in enumerate(places)
            if sequence.history is not None
        ]
        self._one_each = all(count == 1 for count in counts)
        self._rows = np.array([row for row, _, _ in places], np.intp)
        self._offsets = np.array([offset for _, _, offset in places], np.int32)
        self._parameters = _parameters([sequence.request.sampling for _, sequence, _ in places])
        self.drafts: Ints = np.array(drafts, np.int32)
        self.wants = np.array([Want.TOKEN if count else Want.NOTHING for count in counts], np.uint8)

    def sampling(self, ends: Ints, rows: list[Row]) -> AnswerSampling:
        """`ends` [rows] position of the first token that each row draws."""
        draw = ends if self._one_each else ends[self._rows] + self._offsets
        if not self._with_history:
            return replace(self._parameters, draw=draw)
        histories = {
            answer: history.after(rows[row].drafts[:offset]) if offset else history.table
            for answer, row, history, offset in self._with_history
        }
        table = np.concatenate(list(histories.values()), axis=1)
        answers = np.repeat(np.array(list(histories), np.int32), [part.shape[1] for part in histories.values()])
        return replace(
            self._parameters,
            draw=draw,
            history_answers=answers,
            history_tokens=table[0],
            history_prompt=table[1],
            history_output=table[2],
        )


def _tokens(rows: list[Row]) -> list[int]:
    """All rows' tokens, 0 for a carried one."""
    tokens: list[int] = []
    for row in rows:
        known = row.sequence.tokens
        tokens += (known[row.start],) if row.end - row.start == 1 and row.carry < 0 else known[row.start : row.end]
        if row.carry >= 0:
            tokens.append(0)
        elif row.drafts:
            tokens += row.drafts
    return tokens


def _masks(rows: list[Row]) -> tuple[Ints, NDArray[np.uint32]]:
    """([masked answers], [masked answers, words]) of the rows that have masks."""
    masked: list[int] = []
    answers = 0
    for row in rows:
        masked += range(answers, answers + len(row.masks))
        answers += row.wants_token + len(row.drafts)
    if not masked:
        return NO_INTS, NO_MASKS
    return np.array(masked, np.int32), np.stack([mask for row in rows for mask in row.masks])


def _parameters(settings: list[Sampling]) -> AnswerSampling:
    """The parameters that do not change from step to step, one setting per answer."""
    biases = [(index, *bias) for index, sampling in enumerate(settings) for bias in sampling.logit_bias]
    temperatures = [s.temperature if s.temperature >= SMALLEST_TEMPERATURE else 0.0 for s in settings]
    return AnswerSampling(
        temperature=np.array(temperatures, np.float32),
        top_k=np.array([min(s.top_k, 2**31 - 1) for s in settings], np.int32),
        top_p=np.array([max(s.top_p, SMALLEST_TOP_P) for s in settings], np.float32),
        min_p=np.array([s.min_p for s in settings], np.float32),
        repetition_penalty=np.array([s.repetition_penalty for s in settings], np.float32),
        presence_penalty=np.array([s.presence_penalty for s in settings], np.float32),
        frequency_penalty=np.array([s.frequency_penalty for s in settings], np.float32),
        seed=np.array([s.seed for s in settings], np.uint64),
        draw=NO_INTS,
        logprobs=np.array([-1 if s.logprobs is None else s.logprobs for s in settings], np.int32),
        bias_answers=np.array([index for index, _, _ in biases], np.int32),
        bias_tokens=np.array([token for _, token, _ in biases], np.int32),
        bias_values=np.array([value for _, _, value in biases], np.float32),
        history_answers=NO_INTS,
        history_tokens=NO_INTS,
        history_prompt=NO_INTS,
        history_output=NO_INTS,
    )
