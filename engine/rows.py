"""Rows: the share of each sequence in a step, and their translation into one Batch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .batch import Batch, Ints, SampleSettings, Want

if TYPE_CHECKING:
    from .history import TokenHistory
    from .kv import Copies, Lease
    from .request import Sampling, Sequence

NO_INTS: Ints = np.zeros(0, np.int32)
NO_DRAFTS: list[int] = []  # the draft counts of a step in which no row has drafts
NO_COPIES: Ints = np.zeros((0, 2), np.int32)
NO_MASKS: NDArray[np.uint32] = np.zeros((0, 0), np.uint32)
MIN_TOP_P = float(np.finfo(np.float32).tiny)  # float32 rounds smaller values to 0, which would keep no token
# Temperatures below this count as 0, which means greedy. They would make the draw greedy anyway, and a much smaller
# divisor would overflow the float32 logits.
MIN_TEMPERATURE = 1e-5


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's part of a step: positions start…end-1, and after them the positions of the drafts."""

    sequence: Sequence
    lease: Lease
    start: int
    end: int
    carry: int  # row of the previous step that draws this row's last token; -1: the host has all tokens
    has_sample: bool  # whether the row returns a token or a hidden state (the request says which)
    drafts: tuple[int, ...] = ()  # the proposed tokens at positions end…, which the step verifies
    masks: tuple[NDArray[np.uint32], ...] = ()  # the allowed tokens of each token that the row draws; empty: all


class BatchBuilder:
    """Builds batches. An array that equals the array of the previous batch is reused, so nobody may write to an
    array."""

    def __init__(self) -> None:
        self._sampled: list[Sequence | None] = []  # the sequence of each row; None: the row returns nothing
        self._draft_counts = NO_DRAFTS  # number of drafts of each row
        self._samples = _Samples([], [])
        self._leases: list[Lease] = []  # the lease of each row
        self._changes: list[int] = []  # Lease.changes of each lease when its page table was built
        self._tables: tuple[Ints, ...] = ()  # for each cache group: the page table of these leases
        self._states = NO_INTS  # the state slot of each lease
        self._adapters = NO_INTS  # the adapter slot of each row
        self._scales: NDArray[np.float32] = np.zeros(0, np.float32)

    def build(
        self, rows: list[Row], page_copies: Copies, state_copies: list[tuple[int, int]], freed_pages: Copies
    ) -> Batch:
        """The batch of a step. `page_copies` (one list for each cache group) and `state_copies` list the copies that
        must be made before the step, as (source, target). `freed_pages`: as KVCache.take_freed returns them."""
        starts = np.array([row.start for row in rows], np.int32)
        ends = np.array([row.end for row in rows], np.int32)
        draft_counts = NO_DRAFTS
        mask_samples = NO_INTS
        masks = NO_MASKS
        special = [row for row in rows if row.drafts or row.masks]
        if special:
            draft_counts = [len(row.drafts) for row in rows]
            mask_samples, masks = _masks(rows)
        self._update_samples(rows, draft_counts)
        self._update_leases(rows)
        samples = self._samples
        counts = ends - starts
        if draft_counts:
            counts += samples.drafts
        row_starts = np.zeros(len(rows) + 1, np.int32)
        counts.cumsum(out=row_starts[1:])
        tokens = _tokens(rows)
        positions = starts
        if len(tokens) > len(rows):
            positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - row_starts[:-1], counts)
        return Batch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            row_starts=row_starts,
            drafts=samples.drafts,
            page_tables=self._tables,
            states=self._states,
            adapters=self._adapters,
            adapter_scales=self._scales,
            carry=np.array([row.carry for row in rows], np.int32),
            wants=samples.wants,
            sampling=samples.sampling(ends, rows),
            mask_samples=mask_samples,
            masks=masks,
            page_copies=tuple(map(_pairs, page_copies)),
            state_copies=_pairs(state_copies),
            freed_pages=tuple(map(_pairs, freed_pages)),
        )

    def _update_samples(self, rows: list[Row], draft_counts: list[int]) -> None:
        sampled = [row.sequence if row.has_sample else None for row in rows]
        if sampled != self._sampled or draft_counts != self._draft_counts:
            self._sampled = sampled
            self._draft_counts = draft_counts
            self._samples = _Samples(sampled, draft_counts)

    def _update_leases(self, rows: list[Row]) -> None:
        leases = [row.lease for row in rows]
        changes = [lease.changes for lease in leases]
        if leases != self._leases:
            self._states = _column(leases, "state", np.int32)
            self._adapters = _column(rows, "sequence.adapter_slot", np.int32)
            self._scales = _column(rows, "sequence.request.adapter_scale", np.float32)
            groups = range(len(leases[0].pages))
            self._tables = tuple([_page_table(leases, group, range(len(leases)), None) for group in groups])
        elif changes != self._changes:
            stale = np.flatnonzero(np.array(changes) != np.array(self._changes)).tolist()
            tables = enumerate(self._tables)
            self._tables = tuple([_page_table(leases, group, stale, before) for group, before in tables])
        self._leases = leases
        self._changes = changes


def _page_table(leases: list[Lease], group: int, stale: Iterable[int], before: Ints | None) -> Ints:
    """A new page table [rows, pages] of one cache group. Rows that are not in `stale` are copied from the table
    `before`."""
    width = max([len(lease.pages[group]) for lease in leases])
    table = np.zeros((len(leases), width), np.int32)
    if before is not None:
        common = min(width, before.shape[1])
        table[:, :common] = before[:, :common]
    for row in stale:
        pages = leases[row].pages[group]
        table[row, : len(pages)] = pages
        table[row, len(pages) :] = 0
    return table


class _Sample(NamedTuple):
    """A token or a hidden state that a step returns. A row with drafts draws several tokens."""

    row: int
    sequence: Sequence
    offset: int  # number of the row's drafts before the drawn token


class _Samples:
    """Arrays with one element for each sample of a step. They stay valid while the same sequences have samples, with
    the same draft counts."""

    def __init__(self, sampled: list[Sequence | None], draft_counts: list[int]) -> None:
        """`sampled`: the sequence of each row; None: the row returns nothing. `draft_counts`: the number of drafts of
        each row; empty: no row has drafts."""
        drafts = draft_counts or [0] * len(sampled)
        samples: list[_Sample] = []
        for row, sequence in enumerate(sampled):
            if sequence is not None:
                samples += [_Sample(row, sequence, offset) for offset in range(1 + drafts[row])]
        self._histories: list[tuple[int, int, int, TokenHistory]] = []  # _Sample's index, row, offset, history
        for index, (row, sequence, offset) in enumerate(samples):
            if sequence.history is not None:
                self._histories.append((index, row, offset, sequence.history))
        self._rows = _column(samples, "row", np.intp)
        self._offsets = _column(samples, "offset", np.int32)
        self._one_each = self._rows.tolist() == list(range(len(sampled)))
        self._parameters = _parameters([sample.sequence.request.sampling for sample in samples])
        self.drafts: Ints = np.array(drafts, np.int32)
        self.wants = np.full(len(sampled), Want.NOTHING, np.uint8)
        wants_hidden = _column(samples, "sequence.request.wants_hidden", np.bool_)
        self.wants[self._rows] = np.where(wants_hidden, Want.HIDDEN, Want.TOKEN)

    def sampling(self, ends: Ints, rows: list[Row]) -> SampleSettings:
        """The sampling parameters of all samples. `ends` [rows]: position of each row's first drawn token."""
        draw = ends if self._one_each else ends[self._rows] + self._offsets
        if not self._histories:
            return replace(self._parameters, draw=draw)
        tables = [
            history.after(rows[row].drafts[:offset]) if offset else history.table
            for _, row, offset, history in self._histories
        ]
        table = np.concatenate(tables, axis=1)
        indices = np.array([index for index, *_ in self._histories], np.int32)
        return replace(
            self._parameters,
            draw=draw,
            history_samples=np.repeat(indices, [table.shape[1] for table in tables]),
            history_tokens=table[0],
            history_prompt=table[1],
            history_output=table[2],
        )


def _column(records: List[Any], name: str, dtype: DTypeLike) -> NDArray[Any]:
    """The attribute `name` of every record, as an array [records]."""
    return np.fromiter(map(attrgetter(name), records), dtype, len(records))


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    """The pairs as an array [pairs, 2]."""
    return np.array(pairs, np.int32) if pairs else NO_COPIES


def _tokens(rows: list[Row]) -> list[int]:
    """The tokens of all rows, drafts included. A carried token is 0."""
    tokens: list[int] = []
    for row in rows:
        if row.carry < 0 and row.end - row.start == 1:  # faster than a slice
            tokens.append(row.sequence.tokens[row.start])
        else:
            tokens += row.sequence.tokens[row.start : row.end]
        if row.carry >= 0:
            tokens.append(0)
        elif row.drafts:
            tokens += row.drafts
    return tokens


def _masks(rows: list[Row]) -> tuple[Ints, NDArray[np.uint32]]:
    """(indices [masked samples], masks [masked samples, words]) of the drawn tokens that have a mask."""
    masked: list[int] = []
    masks: list[NDArray[np.uint32]] = []
    samples = 0
    for row in rows:
        masked += range(samples, samples + len(row.masks))
        masks += row.masks
        samples += row.has_sample + len(row.drafts)
    if not masked:
        return NO_INTS, NO_MASKS
    return np.array(masked, np.int32), np.stack(masks)


def _parameters(settings: list[Sampling]) -> SampleSettings:
    """The sampling parameters that do not change from step to step. `settings`: one for each drawn token."""
    temperature = _column(settings, "temperature", np.float64)
    temperature[temperature < MIN_TEMPERATURE] = 0.0
    top_p = _column(settings, "top_p", np.float64)
    logprobs = [-1 if sampling.logprobs is None else sampling.logprobs for sampling in settings]
    bias_samples: list[int] = []
    biases: list[tuple[int, float]] = []
    for sample, sampling in enumerate(settings):
        bias_samples += [sample] * len(sampling.logit_bias)
        biases += sampling.logit_bias
    return SampleSettings(
        temperature=temperature.astype(np.float32),
        top_k=_column(settings, "top_k", np.int32),
        top_p=np.maximum(top_p, MIN_TOP_P).astype(np.float32),
        min_p=_column(settings, "min_p", np.float32),
        repetition_penalty=_column(settings, "repetition_penalty", np.float32),
        presence_penalty=_column(settings, "presence_penalty", np.float32),
        frequency_penalty=_column(settings, "frequency_penalty", np.float32),
        seed=_column(settings, "seed", np.uint64),
        draw=NO_INTS,
        logprobs=np.array(logprobs, np.int32),
        bias_samples=np.array(bias_samples, np.int32),
        bias_tokens=np.array([token for token, _ in biases], np.int32),
        bias_values=np.array([value for _, value in biases], np.float32),
        history_samples=NO_INTS,
        history_tokens=NO_INTS,
        history_prompt=NO_INTS,
        history_output=NO_INTS,
    )
