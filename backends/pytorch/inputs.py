"""A batch on its way to the device: packed into one host buffer, copied once, read as views."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch
from ...engine.runner import RunnerSpec
from ...kernels.ops.attention import Rows
from ...kernels.ops.step import Adapters
from .device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a batch that a model reads, on the device."""

    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int64, index in the cache of each token's key and value
    last: Tensor  # [answers] int32, index of the last token of each row with an answer
    rows: Rows
    adapters: Adapters | None = None  # None: no row has one
    last_rows: Rows | None = None  # the rows of the tokens `last`, if the last layer computes only these tokens


@dataclass(frozen=True, slots=True)
class Carried:
    """Sources of the input tokens that the previous step draws, which the host does not know yet."""

    ends: Tensor  # [rows] int32, index of each row's last token
    carry: Tensor  # [rows] int32, row of the previous step that draws this row's last token; -1: the host knows it


@dataclass(frozen=True, slots=True)
class Sent:
    """The arrays of a batch on the device, and its rows with an answer."""

    step: Step
    carried: Carried | None
    answers: NDArray[np.int64]  # [answers] indices of the rows with an answer, on the host
    answer_rows: Tensor  # [answers] int64, the same indices on the device
    settings: dict[str, Tensor]  # per answer: the columns of AnswerSampling that have one value per row

    def last_only(self) -> Step:
        """The same step, with a last layer that computes only the rows with an answer."""
        rows = self.step.rows
        count = len(self.answers)
        lens = rows.context_lens
        table = rows.page_table
        if count < len(rows.query_lens):
            lens = lens.index_select(0, self.answer_rows)
            table = table.index_select(0, self.answer_rows)
        starts = torch.arange(count + 1, dtype=torch.int32, device=table.device)
        contexts = tuple(rows.contexts[row] for row in self.answers.tolist())
        return replace(self.step, last_rows=Rows(starts, lens, table, (1,) * count, contexts, rows.exact))

    def first(self, rows: int) -> Sent:
        """The first `rows` rows, if every row has an answer."""
        settings = {name: column[:rows] for name, column in self.settings.items()}
        return replace(self, answers=self.answers[:rows], answer_rows=self.answer_rows[:rows], settings=settings)

    def some(self, answers: NDArray[np.int64], rows: Tensor) -> Sent:
        """The same step with answers for some rows only: `answers` on the host, `rows` on the device."""
        settings = {name: column[rows] for name, column in self.settings.items()}
        return replace(self, answers=answers, answer_rows=rows, settings=settings)


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "draw", "seed_low", "seed_high")
_SETTINGS = (*_FLOATS, *_INTEGERS)


class Inputs:
    """Buffers at fixed addresses, which every step fills.

    Two host buffers alternate: the host packs a step while the copy of the previous step runs. The device buffer is
    written and read in the order of the device's queue.
    """

    def __init__(self, spec: RunnerSpec, device: Device) -> None:
        self._page_size = spec.groups[0].page_size
        self._context = spec.max_context
        self._ops = device.ops
        self._pages = -(-spec.max_context // self._page_size)
        self._most_rows = max(spec.max_rows, *spec.graph_rows, 1)
        words = 6 * max(spec.max_tokens, *spec.graph_tokens, 1) + (9 + len(_SETTINGS) + self._pages) * (
            self._most_rows + 1
        )
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.zeros(words, dtype=torch.int32, device=device.type)
        self._drawn = torch.zeros(self._most_rows, dtype=torch.int32, device=device.type)
        self._tables: Tensor | None = None  # page tables of captured steps, allocated at the first capture
        self._in_tables: tuple[NDArray[Any], int] | None = None  # the page table in `_tables`, and its number of rows

    def send(self, batch: Batch) -> Sent:
        """Start the copy, and put the carried tokens in place (see `keep`)."""
        answers = batch.wants.nonzero()[0]  # Want.NOTHING is 0
        carried = bool((batch.carry >= 0).any())
        columns, rows = self._columns(batch, answers, carried)
        width = batch.page_tables[0].shape[1]
        parts = self._copy(columns, width)
        sent = _read(parts, rows.query_lens, rows.contexts, answers, carried, adapters=_adapters(parts, batch))
        self.take_in(sent)
        return sent

    def take_in(self, sent: Sent) -> None:
        """Put the carried tokens in place."""
        if sent.carried is not None:
            self._ops.sampling.carry(sent.step.tokens, sent.carried.ends, sent.carried.carry, self._drawn)

    def frame(self, rows: int) -> Sent:
        """Views at fixed addresses for a captured step of up to `rows` rows with one token and one answer each. `fill`
        writes the values of a step to them; this call writes inert rows."""
        where = self._device.device
        if self._tables is None:
            self._tables = torch.zeros(self._most_rows, self._pages, dtype=torch.int32, device=where)
        self._tables[:rows] = 0
        self._in_tables = None
        sizes = {"slots": 2 * rows, **dict.fromkeys(_FRAME, rows)}
        sizes |= {"floats": len(_FLOATS) * rows, "integers": len(_INTEGERS) * rows}
        parts = dict(zip(sizes, self._device[: sum(sizes.values())].split(list(sizes.values())), strict=True))
        for name, part in parts.items():
            part.fill_(_FRAME.get(name, 0))
        order = torch.arange(rows + 1, dtype=torch.int32, device=where)
        row_order = order[:rows]
        parts |= {"row_starts": order, "last": row_order, "ends": row_order, "answers": row_order.long()}
        parts["page_table"] = self._tables[:rows]
        return _read(parts, (1,) * rows, (self._context,) * rows, np.arange(rows), carried=True, exact=False)

    def fill(self, batch: Batch, rows: int) -> None:
        """Start the copy of a step into the `frame` of `rows` rows, padded with inert rows."""
        assert self._tables is not None
        host = next(self._hosts)
        count = batch.num_rows
        table = batch.page_tables[0]
        page = table[np.arange(count), batch.positions // self._page_size].astype(np.int64)
        slots = page * self._page_size + batch.positions % self._page_size
        columns = [batch.tokens, batch.positions, batch.positions + np.int32(1), batch.carry, *_of_rows(batch)]
        fixed = (2 + len(columns)) * rows
        numbers = host.numpy()
        _put(numbers[: 2 * rows].view(np.int64), slots, 0)
        for at, (column, inert) in enumerate(zip(columns, _INERT, strict=True), start=2):
            _put(numbers[at * rows : (at + 1) * rows], column, inert)
        # Page tables are never written in place: the same array has the same values.
        unchanged = self._in_tables is not None and self._in_tables[0] is table and self._in_tables[1] == rows
        size = fixed if unchanged else fixed + rows * table.shape[1]
        if not unchanged:
            _put(numbers[fixed:size].reshape(rows, -1), table, 0)
        copied = self._device[:size]
        copied.copy_(host[:size], non_blocking=True)
        if not unchanged:
            self._tables[:rows, : table.shape[1]].copy_(copied[fixed:].view(rows, -1))
            self._in_tables = table, rows

    def drawn(self, rows: int) -> Tensor:
        """[rows] int32, the tokens of the last `keep`, valid until the next step."""
        return self._drawn[:rows]

    def token_frame(self, tokens: int) -> Step:
        """Views at fixed addresses for a captured step of up to `tokens` tokens. Arrays that depend on the rows are not
        part of it. `fill_tokens` writes the values of a step to them; this call writes zeros, which are inert."""
        slots, _, token_ids, positions, last = self._device[: self._fixed(tokens)].split(self._fixed_sizes(tokens))
        empty = self._device[:0]
        for part in (slots, token_ids, positions, last):
            part.zero_()
        return Step(token_ids, positions, slots.view(torch.int64), last, Rows(empty, empty, empty.view(0, 0), (), ()))

    def fill_tokens(self, batch: Batch, tokens: int) -> Sent:
        """Start the copy of a step into its `token_frame`, padded with inert tokens."""
        answers = batch.wants.nonzero()[0]
        carried = bool((batch.carry >= 0).any())
        columns, lens = self._columns(batch, answers, carried)
        filled = dict(zip(_FIXED, self._fixed_sizes(tokens), strict=True))
        for name, size in filled.items():
            columns[name].append(np.zeros(size - sum(map(len, columns[name])), np.int32))
        parts = self._copy(columns, batch.page_tables[0].shape[1])
        lengths = {"slots": 2 * batch.num_tokens, "answers": 2 * len(answers), "last": len(answers)}
        for name in filled:
            parts[name] = parts[name][: lengths.get(name, batch.num_tokens)]
        sent = _read(parts, lens.query_lens, lens.contexts, answers, carried)
        self.take_in(sent)
        return sent

    def _fixed_sizes(self, tokens: int) -> list[int]:
        """Words of the columns _FIXED. There are at most as many answers as tokens."""
        rows = min(tokens, self._most_rows)
        return [2 * tokens, 2 * rows, tokens, tokens, rows]

    def _fixed(self, tokens: int) -> int:
        return sum(self._fixed_sizes(tokens))

    def keep(self, sent: Sent, tokens: Tensor) -> None:
        """Keep the tokens that this step draws, for rows of the next step that carry them."""
        if len(sent.answers) == len(sent.step.rows.query_lens):
            self._drawn[: len(tokens)].copy_(tokens)
        else:
            self._drawn.index_copy_(0, sent.answer_rows, tokens.int())

    def _columns(
        self, batch: Batch, answers: NDArray[np.int64], carried: bool
    ) -> tuple[dict[str, list[NDArray[Any]]], _Lens]:
        """The columns to copy in words of 4 bytes: columns of 8-byte numbers first, the page table last."""
        lens = batch.row_starts[1:] - batch.row_starts[:-1]
        contexts = batch.context_lens
        ends = batch.row_starts[1:] - 1
        row_of = np.repeat(np.arange(batch.num_rows), lens)
        page = batch.page_tables[0][row_of, batch.positions // self._page_size].astype(np.int64)
        columns: dict[str, list[NDArray[Any]]] = {
            "slots": [(page * self._page_size + batch.positions % self._page_size).view(np.int32)],
            "answers": [answers.astype(np.int64).view(np.int32)],
            "tokens": [batch.tokens],
            "positions": [batch.positions],
            "last": [ends[answers]],
            "row_starts": [batch.row_starts],
            "context_lens": [contexts],
            **_of_answers(batch),
        }
        if batch.adapters.any():
            columns["adapters"] = [np.repeat(batch.adapters, lens)]
            columns["adapter_scales"] = [np.repeat(_scales(batch), lens).view(np.int32)]
        if carried:
            columns |= {"ends": [ends], "carry": [batch.carry]}
        columns["page_table"] = [batch.page_tables[0].reshape(-1)]
        return columns, _Lens(tuple(lens.tolist()), tuple(contexts.tolist()))

    def _copy(self, columns: dict[str, list[NDArray[Any]]], width: int) -> dict[str, Tensor]:
        """Copy all columns at once. The views are valid until the next step."""
        host = next(self._hosts)
        sizes = [sum(map(len, parts)) for parts in columns.values()]
        total = sum(sizes)
        np.concatenate([part for parts in columns.values() for part in parts], out=host.numpy()[:total])
        device = self._device[:total]
        device.copy_(host[:total], non_blocking=True)
        parts = dict(zip(columns, device.split(sizes), strict=True))
        parts["page_table"] = parts["page_table"].view(-1, width)
        return parts


@dataclass(frozen=True, slots=True)
class _Lens:
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]


_FIXED = ("slots", "answers", "tokens", "positions", "last")  # columns of a step with many tokens at fixed addresses

# Columns of a captured decode step, one word a row, and their inert values. Slots come before, settings after.
_FRAME = {"tokens": 0, "positions": 0, "context_lens": 1, "carry": -1}
_INERT = (*_FRAME.values(), *[0] * len(_SETTINGS))


def _scales(batch: Batch) -> NDArray[np.float32]:
    """[rows] scale of each row's adapter; 0 without an adapter."""
    return np.where(batch.adapters > 0, batch.adapter_scales, np.float32(0))


def _adapters(columns: dict[str, Tensor], batch: Batch) -> Adapters | None:
    """The adapters of the copied columns. Neighbouring rows with the same adapter share a segment."""
    if "adapters" not in columns:
        return None
    segments: list[tuple[int, int, int]] = []
    starts = batch.row_starts.tolist()
    for row, slot in enumerate(batch.adapters.tolist()):
        if segments and segments[-1][2] == slot:
            segments[-1] = segments[-1][0], starts[row + 1], slot
        else:
            segments.append((starts[row], starts[row + 1], slot))
    used = tuple(sorted({slot for _, _, slot in segments} - {0}))
    return Adapters(columns["adapters"], columns["adapter_scales"].view(torch.float32), used, tuple(segments))


def _put(place: NDArray[Any], values: NDArray[Any], inert: int) -> None:
    """Write `values` to the front of `place`, and `inert` to all other elements."""
    place[: len(values)] = values
    place[len(values) :] = inert


def _read(
    parts: dict[str, Tensor],
    query_lens: tuple[int, ...],
    contexts: tuple[int, ...],
    answers: NDArray[np.int64],
    carried: bool,
    exact: bool = True,
    adapters: Adapters | None = None,
) -> Sent:
    """The copied columns as a Sent."""
    rows = Rows(parts["row_starts"], parts["context_lens"], parts["page_table"], query_lens, contexts, exact)
    step = Step(parts["tokens"], parts["positions"], parts["slots"].view(torch.int64), parts["last"], rows, adapters)
    floats = parts["floats"].view(torch.float32)
    integers = parts["integers"]
    settings = [*floats.view(len(_FLOATS), -1).unbind(), *integers.view(len(_INTEGERS), -1).unbind()]
    return Sent(
        step,
        Carried(parts["ends"], parts["carry"]) if carried else None,
        answers,
        parts["answers"].view(torch.int64),
        dict(zip(_SETTINGS, settings, strict=True)),
    )


def _of_rows(batch: Batch) -> list[NDArray[Any]]:
    """[rows] sampling settings of a step with one token per row; inert for rows without an answer."""
    columns = _settings(batch)
    answers = batch.wants.nonzero()[0]
    if len(answers) == batch.num_rows:
        return columns
    rows = [np.zeros(batch.num_rows, np.int32) for _ in columns]
    for row, column in zip(rows, columns, strict=True):
        row[answers] = column
    return rows


def _of_answers(batch: Batch) -> dict[str, list[NDArray[Any]]]:
    """Sampling settings of all answers, as columns `floats` and `integers`."""
    columns = _settings(batch)
    return {"floats": columns[: len(_FLOATS)], "integers": columns[len(_FLOATS) :]}


def _settings(batch: Batch) -> list[NDArray[Any]]:
    """Columns in the order of _SETTINGS as int32; floats by their bits."""
    rows = batch.sampling
    halves = rows.seed.astype("<u8").view("<i4").reshape(-1, 2).T
    return [*(getattr(rows, name).view(np.int32) for name in _FLOATS), rows.top_k, rows.draw, *halves]
