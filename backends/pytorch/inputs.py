"""Copies a batch to the device: all its arrays are packed into one host buffer, copied at once, and read as views."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch, Ints
from ...engine.runner import RunnerSpec
from ...kernels.ops.attention import Rows
from ...kernels.ops.scan import RunScan, run_scan
from ...kernels.ops.state import StateRows
from ...kernels.ops.step import Adapters, Places
from ...kernels.ops.streams import IN_ORDER, Streams
from .adapter_inputs import NO_ADAPTERS, AdapterInputs, BatchAdapters, write_padded
from .device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of a batch that a model reads, on the device."""

    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int64, position in the KV cache of each token's key and value, in cache group 0
    last: Tensor  # [samples] int32, for each drawn token or hidden state: index of the last token of its row
    rows: Rows  # with the pages of cache group 0
    adapters: Adapters | None = None  # adapters of all tokens; None: no row has an adapter
    sample_adapters: Adapters | None = None  # adapters of the tokens `last`; None: no such token has an adapter
    last_rows: Rows | None = None  # rows of the tokens `last`; None: the last layer computes all tokens
    streams: Streams = IN_ORDER  # as in LayerStep; a second stream only in a captured step
    other_places: tuple[Places, ...] = ()  # places in the cache groups 1, 2, …
    state_rows: StateRows | None = None  # None: the step is traced
    run_scan: RunScan = run_scan  # as in LayerStep

    @property
    def places(self) -> tuple[Places, ...]:
        """The places in each cache group."""
        return Places(self.rows, self.slots, self.last_rows), *self.other_places


@dataclass(frozen=True, slots=True)
class Carried:
    """The rows of the previous step that draw input tokens of this step. The host does not have these tokens yet."""

    ends: Tensor  # [rows] int32, index of each row's last token
    carry: Tensor  # [rows] int32, row of the previous step that draws this row's last token; -1: the host has the token


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on the device."""

    step: Step
    carried: Carried | None
    samples: NDArray[np.int64]  # [samples] the row of each sample (drawn token or hidden state), on the host
    sample_rows: Tensor  # [samples] int64, the row of each sample, on the device
    settings: dict[str, Tensor]  # name -> column [samples]: the sampling settings with one value per sample

    def last_only(self) -> Step:
        """This step, changed so that the last layer computes only the tokens whose hidden states are needed."""
        rows = self.step.rows
        count = len(self.samples)
        is_part = count < len(rows.query_lens)
        lens = rows.context_lens.index_select(0, self.sample_rows) if is_part else rows.context_lens
        starts = torch.arange(count + 1, dtype=torch.int32, device=lens.device)
        contexts = tuple(rows.contexts[row] for row in self.samples.tolist())

        def last(rows: Rows) -> Rows:
            table = rows.page_table.index_select(0, self.sample_rows) if is_part else rows.page_table
            return Rows(starts, lens, table, (1,) * count, contexts, rows.exact, rows.group)

        others = tuple(places._replace(sampled=last(places.rows)) for places in self.step.other_places)
        return replace(self.step, last_rows=last(rows), other_places=others)

    def first(self, rows: int) -> Sent:
        """This batch with the samples of its first `rows` rows only. Every row has one sample."""
        settings = {name: column[:rows] for name, column in self.settings.items()}
        return replace(self, samples=self.samples[:rows], sample_rows=self.sample_rows[:rows], settings=settings)

    def with_samples(self, samples: NDArray[np.int64], rows: Tensor) -> Sent:
        """This batch with samples for some rows only. Their indices are `samples` in main memory and `rows` on the
        device."""
        settings = {name: column[rows] for name, column in self.settings.items()}
        return replace(self, samples=samples, sample_rows=rows, settings=settings)


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "draw", "seed_low", "seed_high")
_SETTINGS = (*_FLOATS, *_INTEGERS)


class Inputs:
    """Buffers at fixed addresses, which every step overwrites.

    Two host buffers alternate, so the host can pack a step while the copy of the previous step runs. One device buffer
    is enough: the device's stream orders its writes and reads.
    """

    def __init__(self, spec: RunnerSpec, device: Device) -> None:
        self._page_size = spec.groups[0].page_size  # that of all groups
        self._groups = range(len(spec.groups))
        # Names of the columns with the cache slots and the page tables of each group.
        self._slot_columns = [f"slots {group}" for group in self._groups]
        self._table_columns = [f"page_table {group}" for group in self._groups]
        self._fixed = (*self._slot_columns, *_FIXED)  # columns that a captured prefill reads
        self._context = spec.max_context
        self._ops = device.ops
        self._pages = -(-spec.max_context // self._page_size)
        self._max_rows = max(spec.max_rows, *spec.graph_rows, 1)
        max_tokens = max(spec.max_tokens, *spec.graph_tokens, 1)
        words = (2 + 2 * len(self._groups)) * max_tokens
        words += (10 + len(_SETTINGS) + self._pages * len(self._groups)) * (self._max_rows + 1)
        self.adapters = AdapterInputs(max_tokens, self._max_rows, spec.num_adapters, device)
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.zeros(words, dtype=torch.int32, device=device.type)
        self._drawn = torch.zeros(self._max_rows, dtype=torch.int32, device=device.type)
        # For each cache group: the page tables of captured steps. They are allocated at the first capture.
        self._tables: list[Tensor] = []
        # For each cache group: the page table that was last copied to `_tables`, and the number of rows of its frame.
        self._copied_tables: list[tuple[NDArray[Any] | None, int]] = []

    def send(self, batch: Batch) -> Sent:
        """Start the copy of a batch, then write its carried tokens (see `carry`)."""
        samples = batch.wants.nonzero()[0]  # Want.NOTHING is 0
        carried = bool((batch.carry >= 0).any())
        columns, rows = self._columns(batch, samples, carried)
        adapters = self.adapters.send(batch, samples)
        copied = self._copy(columns, batch)
        sent = self._read(copied, rows.query_lens, rows.contexts, samples, carried, adapters=adapters)
        self.carry(sent)
        return sent

    def carry(self, sent: Sent) -> None:
        """Write the carried tokens to the inputs of the step: tokens that the previous step drew (see `keep`)."""
        if sent.carried is not None:
            self._ops.sampling.carry(sent.step.tokens, sent.carried.ends, sent.carried.carry, self._drawn)

    def frame(self, rows: int, *, adapted: bool = False) -> Sent:
        """Views at fixed addresses for a captured step of at most `rows` rows with one token and one sample each.
        `fill` writes the values of a step to the views; this call writes inert rows. `adapted`: rows may have
        adapters."""
        device = self._device.device
        if not self._tables:
            shape = self._max_rows, self._pages
            self._tables = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in self._groups]
        for table in self._tables:
            table[:rows] = 0
        self._copied_tables = [(None, 0)] * len(self._tables)
        sizes = {**dict.fromkeys(self._slot_columns, 2 * rows), **dict.fromkeys(_FRAME, rows)}
        sizes |= {"floats": len(_FLOATS) * rows, "integers": len(_INTEGERS) * rows}
        used = self._device[: sum(sizes.values())]
        columns = dict(zip(sizes, used.split(list(sizes.values())), strict=True))
        for name, column in columns.items():
            column.fill_(_FRAME.get(name, 0))
        order = torch.arange(rows + 1, dtype=torch.int32, device=device)
        row_order = order[:rows]
        columns |= {"row_starts": order, "last": row_order, "ends": row_order, "samples": row_order.long()}
        columns |= {name: table[:rows] for name, table in zip(self._table_columns, self._tables, strict=True)}
        adapters = self.adapters.decode_frame(rows) if adapted else NO_ADAPTERS
        return self._read(columns, (1,) * rows, (self._context,) * rows, np.arange(rows), True, False, adapters)

    def fill(self, batch: Batch, rows: int) -> Ints:
        """Start the copy of a decode step to the `frame` of `rows` rows -> the context lengths of the batch's rows.
        Padding rows get inert values, which change nothing."""
        host = next(self._hosts)
        contexts = batch.positions + np.int32(1)
        columns = [batch.tokens, batch.positions, contexts, batch.carry, batch.states, *_row_settings(batch)]
        numbers = host.numpy()
        fixed = 0  # becomes the number of words in all columns except the page tables
        for table in batch.page_tables:
            slots = self._slots(table, np.arange(batch.num_rows), batch.positions)
            write_padded(numbers[fixed : fixed + 2 * rows].view(np.int64), slots, 0)
            fixed += 2 * rows
        for column, inert in zip(columns, _INERT, strict=True):
            write_padded(numbers[fixed : fixed + rows], column, inert)
            fixed += rows
        size = fixed
        changed = [group for group in self._groups if self._is_changed(group, batch.page_tables[group], rows)]
        for group in changed:
            table = batch.page_tables[group]
            words = rows * table.shape[1]
            write_padded(numbers[size : size + words].reshape(rows, -1), table, 0)
            size += words
        copied = self._device[:size]
        copied.copy_(host[:size], non_blocking=True)
        for group in changed:
            table = batch.page_tables[group]
            width = table.shape[1]
            self._tables[group][:rows, :width].copy_(copied[fixed : fixed + rows * width].view(rows, -1))
            self._copied_tables[group] = table, rows
            fixed += rows * width
        return contexts

    def _is_changed(self, group: int, table: NDArray[Any], rows: int) -> bool:
        """Whether `_tables` has another page table. Page tables are never written in place: the same array has the same
        values."""
        copied, copied_rows = self._copied_tables[group]
        return copied is not table or copied_rows != rows

    def _slots(self, table: NDArray[Any], rows: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.int64]:
        """The cache slots of `positions` [tokens] of the rows `rows` [tokens] of a page table."""
        page = table[rows, positions // self._page_size].astype(np.int64)
        slots: NDArray[np.int64] = page * self._page_size + positions % self._page_size
        return slots

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A context for steps that belong to no batch, e.g. during a capture. Afterwards the tokens that the last batch
        drew are restored."""
        drawn = self._drawn.clone()
        yield
        self._drawn.copy_(drawn)

    def drawn(self, rows: int) -> Tensor:
        """The tokens [rows] int32 that the last call of `keep` stored. They are valid until the next step."""
        return self._drawn[:rows]

    def token_frame(self, tokens: int, *, adapted: bool = False) -> Step:
        """Views at fixed addresses for a captured step of at most `tokens` tokens, without the arrays that depend on
        the rows. `fill_tokens` writes the values of a step to the views; this call writes zeros, which are inert.
        `adapted`: rows may have adapters."""
        sizes = self._fixed_sizes(tokens)
        *slots, _, token_ids, positions, last = self._device[: sum(sizes)].split(sizes)
        empty = self._device[:0]
        for column in (*slots, token_ids, positions, last):
            column.zero_()
        rows = Rows(empty, empty, empty.view(0, 0), (), ())
        adapters = self.adapters.frame(tokens) if adapted else None
        first, *others = [
            Places(replace(rows, group=group), column.view(torch.int64)) for group, column in enumerate(slots)
        ]
        step = Step(token_ids, positions, first.slots, last, first.rows, adapters)
        return replace(step, other_places=tuple(others), state_rows=StateRows(first.rows, empty))

    def fill_tokens(self, batch: Batch, frame: Step) -> Sent:
        """Start the copy of a step to a `token_frame`. Padding tokens get inert values, which change nothing."""
        tokens = len(frame.tokens)
        samples = batch.wants.nonzero()[0]
        carried = bool((batch.carry >= 0).any())
        columns, lens = self._columns(batch, samples, carried)
        padded_sizes = dict(zip(self._fixed, self._fixed_sizes(tokens), strict=True))
        for name, size in padded_sizes.items():
            columns[name].append(np.zeros(size - sum(map(len, columns[name])), np.int32))
        copied = self._copy(columns, batch)
        lengths = {"samples": 2 * len(samples), "last": len(samples)}
        lengths |= dict.fromkeys(self._slot_columns, 2 * batch.num_tokens)
        for name in padded_sizes:
            copied[name] = copied[name][: lengths.get(name, batch.num_tokens)]
        adapters = NO_ADAPTERS if frame.adapters is None else self.adapters.send(batch, samples, frame.adapters)
        sent = self._read(copied, lens.query_lens, lens.contexts, samples, carried, adapters=adapters)
        self.carry(sent)
        return sent

    def _fixed_sizes(self, tokens: int) -> list[int]:
        """Sizes of the columns _fixed in words of 4 bytes. There are at most as many samples as tokens."""
        rows = min(tokens, self._max_rows)
        return [*[2 * tokens for _ in self._groups], 2 * rows, tokens, tokens, rows]

    def keep(self, sent: Sent, tokens: Tensor) -> None:
        """Store the tokens that this step draws; `carry` writes them to the inputs of the next step."""
        if len(sent.samples) == len(sent.step.rows.query_lens):
            self._drawn[: len(tokens)].copy_(tokens)
        else:
            self._drawn.index_copy_(0, sent.sample_rows, tokens.int())

    def _columns(
        self, batch: Batch, samples: NDArray[np.int64], carried: bool
    ) -> tuple[dict[str, list[NDArray[Any]]], _Lens]:
        """The columns to copy, as arrays of 4-byte words. Columns of 8-byte numbers come first, for their alignment."""
        lens = batch.row_starts[1:] - batch.row_starts[:-1]
        contexts = batch.context_lens
        ends = batch.row_starts[1:] - 1
        row_of = np.repeat(np.arange(batch.num_rows), lens)
        columns: dict[str, list[NDArray[Any]]] = {
            name: [self._slots(table, row_of, batch.positions).view(np.int32)]
            for name, table in zip(self._slot_columns, batch.page_tables, strict=True)
        }
        columns |= {
            "samples": [samples.astype(np.int64).view(np.int32)],
            "tokens": [batch.tokens],
            "positions": [batch.positions],
            "last": [ends[samples]],
            "row_starts": [batch.row_starts],
            "context_lens": [contexts],
            "states": [batch.states],
            **_sample_settings(batch),
        }
        if carried:
            columns |= {"ends": [ends], "carry": [batch.carry]}
        for name, table in zip(self._table_columns, batch.page_tables, strict=True):
            columns[name] = [table.reshape(-1)]
        return columns, _Lens(tuple(lens.tolist()), tuple(contexts.tolist()))

    def _copy(self, columns: dict[str, list[NDArray[Any]]], batch: Batch) -> dict[str, Tensor]:
        """Copy all columns at once. The result has views of the device buffer, which are valid until the next step."""
        host = next(self._hosts)
        sizes = [sum(map(len, arrays)) for arrays in columns.values()]
        total = sum(sizes)
        np.concatenate(list(chain.from_iterable(columns.values())), out=host.numpy()[:total])
        device = self._device[:total]
        device.copy_(host[:total], non_blocking=True)
        copied = dict(zip(columns, device.split(sizes), strict=True))
        for name, table in zip(self._table_columns, batch.page_tables, strict=True):
            copied[name] = copied[name].view(table.shape)
        return copied

    def _read(
        self,
        columns: dict[str, Tensor],
        query_lens: tuple[int, ...],
        contexts: tuple[int, ...],
        samples: NDArray[np.int64],
        carried: bool,
        exact: bool = True,
        adapters: BatchAdapters = NO_ADAPTERS,
    ) -> Sent:
        """The copied columns, as views in a `Sent` record."""
        starts, lens = columns["row_starts"], columns["context_lens"]
        first, *others = [
            Places(
                Rows(starts, lens, columns[self._table_columns[group]], query_lens, contexts, exact, group),
                columns[self._slot_columns[group]].view(torch.int64),
            )
            for group in self._groups
        ]
        step = Step(
            columns["tokens"],
            columns["positions"],
            first.slots,
            columns["last"],
            first.rows,
            *adapters,
            other_places=tuple(others),
            state_rows=StateRows(first.rows, columns["states"]),
        )
        floats = columns["floats"].view(torch.float32)
        integers = columns["integers"]
        settings = [*floats.view(len(_FLOATS), -1).unbind(), *integers.view(len(_INTEGERS), -1).unbind()]
        return Sent(
            step,
            Carried(columns["ends"], columns["carry"]) if carried else None,
            samples,
            columns["samples"].view(torch.int64),
            dict(zip(_SETTINGS, settings, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class _Lens:
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]


# Columns that a captured prefill reads, besides the slots.
_FIXED = ("samples", "tokens", "positions", "last")

# Columns of a captured decode step with one word per row, and their inert values. The slots come before these columns,
# the settings after them.
_FRAME = {"tokens": 0, "positions": 0, "context_lens": 1, "carry": -1, "states": -1}
_INERT = (*_FRAME.values(), *[0] * len(_SETTINGS))


def _row_settings(batch: Batch) -> list[NDArray[Any]]:
    """Sampling settings of a step with one token per row, each [rows]. Rows that return nothing have zeros."""
    columns = _settings(batch)
    samples = batch.wants.nonzero()[0]
    if len(samples) == batch.num_rows:
        return columns
    rows = [np.zeros(batch.num_rows, np.int32) for _ in columns]
    for row, column in zip(rows, columns, strict=True):
        row[samples] = column
    return rows


def _sample_settings(batch: Batch) -> dict[str, list[NDArray[Any]]]:
    """Sampling settings of all samples, as the columns `floats` and `integers`."""
    columns = _settings(batch)
    return {"floats": columns[: len(_FLOATS)], "integers": columns[len(_FLOATS) :]}


def _settings(batch: Batch) -> list[NDArray[Any]]:
    """The settings in the order of _SETTINGS, each [samples] int32. Floats are reinterpreted as int32."""
    rows = batch.sampling
    halves = rows.seed.astype("<u8").view("<i4").reshape(-1, 2).T
    return [*(getattr(rows, name).view(np.int32) for name in _FLOATS), rows.top_k, rows.draw, *halves]
