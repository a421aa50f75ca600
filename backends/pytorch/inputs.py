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
from ...kernels.ops.step import Adapters
from ...kernels.ops.streams import IN_ORDER, Streams
from .adapter_inputs import NO_ADAPTERS, AdapterInputs, BatchAdapters, write_padded
from .device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of a batch that a model reads, on the device."""

    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int64, position in the KV cache of each token's key and value
    last: Tensor  # [samples] int32, for each drawn token or hidden state: index of the last token of its row
    rows: Rows
    adapters: Adapters | None = None  # adapters of all tokens; None: no row has an adapter
    sample_adapters: Adapters | None = None  # adapters of the tokens `last`; None: no such token has an adapter
    last_rows: Rows | None = None  # rows of the tokens `last`; None: the last layer computes all tokens
    streams: Streams = IN_ORDER  # as in LayerStep; a second stream only in a captured step


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
        lens = rows.context_lens
        table = rows.page_table
        if count < len(rows.query_lens):
            lens = lens.index_select(0, self.sample_rows)
            table = table.index_select(0, self.sample_rows)
        starts = torch.arange(count + 1, dtype=torch.int32, device=table.device)
        contexts = tuple(rows.contexts[row] for row in self.samples.tolist())
        return replace(self.step, last_rows=Rows(starts, lens, table, (1,) * count, contexts, rows.exact))

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
        self._page_size = spec.groups[0].page_size
        self._context = spec.max_context
        self._ops = device.ops
        self._pages = -(-spec.max_context // self._page_size)
        self._max_rows = max(spec.max_rows, *spec.graph_rows, 1)
        max_tokens = max(spec.max_tokens, *spec.graph_tokens, 1)
        words = 4 * max_tokens + (9 + len(_SETTINGS) + self._pages) * (self._max_rows + 1)
        self.adapters = AdapterInputs(max_tokens, self._max_rows, spec.num_adapters, device)
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.zeros(words, dtype=torch.int32, device=device.type)
        self._drawn = torch.zeros(self._max_rows, dtype=torch.int32, device=device.type)
        self._tables: Tensor | None = None  # page tables of captured steps, allocated at the first capture
        # The page table that was last copied to `_tables`, and the number of rows of its frame.
        self._copied_table: tuple[NDArray[Any], int] | None = None

    def send(self, batch: Batch) -> Sent:
        """Start the copy of a batch, then write its carried tokens (see `carry`)."""
        samples = batch.wants.nonzero()[0]  # Want.NOTHING is 0
        carried = bool((batch.carry >= 0).any())
        columns, rows = self._columns(batch, samples, carried)
        width = batch.page_tables[0].shape[1]
        adapters = self.adapters.send(batch, samples)
        sent = _read(self._copy(columns, width), rows.query_lens, rows.contexts, samples, carried, adapters=adapters)
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
        if self._tables is None:
            self._tables = torch.zeros(self._max_rows, self._pages, dtype=torch.int32, device=device)
        self._tables[:rows] = 0
        self._copied_table = None
        sizes = {"slots": 2 * rows, **dict.fromkeys(_FRAME, rows)}
        sizes |= {"floats": len(_FLOATS) * rows, "integers": len(_INTEGERS) * rows}
        used = self._device[: sum(sizes.values())]
        columns = dict(zip(sizes, used.split(list(sizes.values())), strict=True))
        for name, column in columns.items():
            column.fill_(_FRAME.get(name, 0))
        order = torch.arange(rows + 1, dtype=torch.int32, device=device)
        row_order = order[:rows]
        columns |= {"row_starts": order, "last": row_order, "ends": row_order, "samples": row_order.long()}
        columns["page_table"] = self._tables[:rows]
        adapters = self.adapters.decode_frame(rows) if adapted else NO_ADAPTERS
        return _read(columns, (1,) * rows, (self._context,) * rows, np.arange(rows), True, False, adapters)

    def fill(self, batch: Batch, rows: int) -> Ints:
        """Start the copy of a decode step to the `frame` of `rows` rows -> the context lengths of the batch's rows.
        Padding rows get inert values, which change nothing."""
        assert self._tables is not None
        host = next(self._hosts)
        count = batch.num_rows
        table = batch.page_tables[0]
        page = table[np.arange(count), batch.positions // self._page_size].astype(np.int64)
        slots = page * self._page_size + batch.positions % self._page_size
        contexts = batch.positions + np.int32(1)
        columns = [batch.tokens, batch.positions, contexts, batch.carry, *_row_settings(batch)]
        numbers = host.numpy()
        write_padded(numbers[: 2 * rows].view(np.int64), slots, 0)
        fixed = 2 * rows  # becomes the number of words in all columns except the page table
        for column, inert in zip(columns, _INERT, strict=True):
            write_padded(numbers[fixed : fixed + rows], column, inert)
            fixed += rows
        # Page tables are never written in place: the same array has the same values.
        copied_table = self._copied_table
        unchanged = copied_table is not None and copied_table[0] is table and copied_table[1] == rows
        size = fixed if unchanged else fixed + rows * table.shape[1]
        if not unchanged:
            write_padded(numbers[fixed:size].reshape(rows, -1), table, 0)
        copied = self._device[:size]
        copied.copy_(host[:size], non_blocking=True)
        if not unchanged:
            self._tables[:rows, : table.shape[1]].copy_(copied[fixed:].view(rows, -1))
            self._copied_table = table, rows
        return contexts

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
        slots, _, token_ids, positions, last = self._device[: sum(sizes)].split(sizes)
        empty = self._device[:0]
        for column in (slots, token_ids, positions, last):
            column.zero_()
        rows = Rows(empty, empty, empty.view(0, 0), (), ())
        adapters = self.adapters.frame(tokens) if adapted else None
        return Step(token_ids, positions, slots.view(torch.int64), last, rows, adapters)

    def fill_tokens(self, batch: Batch, frame: Step) -> Sent:
        """Start the copy of a step to a `token_frame`. Padding tokens get inert values, which change nothing."""
        tokens = len(frame.tokens)
        samples = batch.wants.nonzero()[0]
        carried = bool((batch.carry >= 0).any())
        columns, lens = self._columns(batch, samples, carried)
        padded_sizes = dict(zip(_FIXED, self._fixed_sizes(tokens), strict=True))
        for name, size in padded_sizes.items():
            columns[name].append(np.zeros(size - sum(map(len, columns[name])), np.int32))
        copied = self._copy(columns, batch.page_tables[0].shape[1])
        lengths = {"slots": 2 * batch.num_tokens, "samples": 2 * len(samples), "last": len(samples)}
        for name in padded_sizes:
            copied[name] = copied[name][: lengths.get(name, batch.num_tokens)]
        adapters = NO_ADAPTERS if frame.adapters is None else self.adapters.send(batch, samples, frame.adapters)
        sent = _read(copied, lens.query_lens, lens.contexts, samples, carried, adapters=adapters)
        self.carry(sent)
        return sent

    def _fixed_sizes(self, tokens: int) -> list[int]:
        """Sizes of the columns _FIXED in words of 4 bytes. There are at most as many samples as tokens."""
        rows = min(tokens, self._max_rows)
        return [2 * tokens, 2 * rows, tokens, tokens, rows]

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
        page = batch.page_tables[0][row_of, batch.positions // self._page_size].astype(np.int64)
        columns: dict[str, list[NDArray[Any]]] = {
            "slots": [(page * self._page_size + batch.positions % self._page_size).view(np.int32)],
            "samples": [samples.astype(np.int64).view(np.int32)],
            "tokens": [batch.tokens],
            "positions": [batch.positions],
            "last": [ends[samples]],
            "row_starts": [batch.row_starts],
            "context_lens": [contexts],
            **_sample_settings(batch),
        }
        if carried:
            columns |= {"ends": [ends], "carry": [batch.carry]}
        columns["page_table"] = [batch.page_tables[0].reshape(-1)]
        return columns, _Lens(tuple(lens.tolist()), tuple(contexts.tolist()))

    def _copy(self, columns: dict[str, list[NDArray[Any]]], width: int) -> dict[str, Tensor]:
        """Copy all columns at once. The result has views of the device buffer, which are valid until the next step."""
        host = next(self._hosts)
        sizes = [sum(map(len, arrays)) for arrays in columns.values()]
        total = sum(sizes)
        np.concatenate(list(chain.from_iterable(columns.values())), out=host.numpy()[:total])
        device = self._device[:total]
        device.copy_(host[:total], non_blocking=True)
        copied = dict(zip(columns, device.split(sizes), strict=True))
        copied["page_table"] = copied["page_table"].view(-1, width)
        return copied


@dataclass(frozen=True, slots=True)
class _Lens:
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]


_FIXED = ("slots", "samples", "tokens", "positions", "last")  # columns that a captured prefill reads

# Columns of a captured decode step with one word per row, and their inert values. The slots come before these columns,
# the settings after them.
_FRAME = {"tokens": 0, "positions": 0, "context_lens": 1, "carry": -1}
_INERT = (*_FRAME.values(), *[0] * len(_SETTINGS))


def _read(
    columns: dict[str, Tensor],
    query_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    samples: NDArray[np.int64],
    carried: bool,
    exact: bool = True,
    adapters: BatchAdapters = NO_ADAPTERS,
) -> Sent:
    """The copied columns, as views in a `Sent` record."""
    rows = Rows(columns["row_starts"], columns["context_lens"], columns["page_table"], query_lens, contexts, exact)
    slots = columns["slots"].view(torch.int64)
    step = Step(columns["tokens"], columns["positions"], slots, columns["last"], rows, *adapters)
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
