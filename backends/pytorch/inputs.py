"""A batch on its way to the device: packed into one host buffer, copied once, read there as views."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch
from ...engine.runner import RunnerSpec
from ...kernels.ops.attention import Rows
from .device import Device


@dataclass(frozen=True, slots=True)
class Step:
    """What a model reads of a batch, on the device."""

    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int64, where each token's key and value go
    last: Tensor  # [answers] int32, index of the last token of each row that wants an answer
    rows: Rows


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch's arrays on the device, and which of its rows want an answer."""

    step: Step
    answers: NDArray[np.int64]  # [answers] those rows, on the host
    answer_rows: Tensor  # the same
    settings: dict[str, Tensor]  # per answer: the columns of SamplingRows that have one value per row


_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "draw", "seed_low", "seed_high")
_SETTINGS = (*_FLOATS, *_INTEGERS)


class Inputs:
    """Buffers of a fixed place, filled anew for every step.

    Two host buffers take turns, so that a step may be packed while the copy of the one before is still under way;
    the device buffer is written and read in the order of the device's queue.
    """

    def __init__(self, spec: RunnerSpec, device: Device) -> None:
        self._page_size = spec.page_size
        self._pages = -(-spec.max_context // spec.page_size)
        words = 3 * spec.max_tokens + (6 + len(_SETTINGS) + self._pages) * (spec.max_rows + 1)
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.empty(words, dtype=torch.int32, device=device.name)
        self._drawn = torch.zeros(spec.max_rows, dtype=torch.int32, device=device.name)

    def send(self, batch: Batch) -> Sent:
        """Start the copy. Tokens carried over are put in from what `keep` was given last."""
        lens = batch.row_starts[1:] - batch.row_starts[:-1]
        contexts = batch.context_lens
        answers = batch.wants.nonzero()[0]  # Want.NOTHING is 0
        ends = batch.row_starts[1:] - 1
        row_of = np.repeat(np.arange(batch.num_rows), lens)
        page = batch.page_table[row_of, batch.positions // self._page_size]
        columns: dict[str, list[NDArray[Any]]] = {
            "tokens": [batch.tokens],
            "positions": [batch.positions],
            "slots": [page * self._page_size + batch.positions % self._page_size],
            "row_starts": [batch.row_starts],
            "context_lens": [contexts],
            "last": [ends[answers]],
            "answers": [answers],
            **_settings(batch, answers),
            "page_table": [batch.page_table.reshape(-1)],
        }
        carried = (batch.carry >= 0).any()
        if carried:
            columns |= {"ends": [ends], "carry": [batch.carry]}
        sent = self._copy(columns)
        tokens = sent["tokens"]
        if carried:
            known = tokens.index_select(0, sent["ends"])
            drawn = self._drawn.index_select(0, sent["carry"].clamp(min=0))
            tokens.index_copy_(0, sent["ends"].long(), torch.where(sent["carry"] >= 0, drawn, known))
        rows = Rows(
            sent["row_starts"],
            sent["context_lens"],
            sent["page_table"].view(batch.page_table.shape),
            tuple(lens.tolist()),
            tuple(contexts.tolist()),
        )
        step = Step(tokens, sent["positions"], sent["slots"].long(), sent["last"], rows)
        floats, integers = sent["floats"].view(torch.float32), sent["integers"]
        settings = [*floats.view(len(_FLOATS), -1).unbind(), *integers.view(len(_INTEGERS), -1).unbind()]
        return Sent(step, answers, sent["answers"].long(), dict(zip(_SETTINGS, settings, strict=True)))

    def keep(self, sent: Sent, tokens: Tensor) -> None:
        """The tokens drawn in this step, for rows of the next that carry them on."""
        self._drawn.index_copy_(0, sent.answer_rows, tokens.int())

    def _copy(self, columns: dict[str, list[NDArray[Any]]]) -> dict[str, Tensor]:
        """One copy of all columns; the views it gives stay valid until the next step."""
        host = next(self._hosts)
        sizes = [sum(map(len, parts)) for parts in columns.values()]
        total = sum(sizes)
        np.concatenate([part for parts in columns.values() for part in parts], out=host.numpy()[:total])
        device = self._device[:total]
        device.copy_(host[:total], non_blocking=True)
        return dict(zip(columns, device.split(sizes), strict=True))


def _settings(batch: Batch, answers: NDArray[np.int64]) -> dict[str, list[NDArray[Any]]]:
    """Of the rows that want an answer; floats by their bits."""
    rows = batch.sampling
    halves = rows.seed.astype("<u8").view("<i4").reshape(-1, 2).T
    floats, integers = [getattr(rows, name).view(np.int32) for name in _FLOATS], [rows.top_k, rows.draw, *halves]
    if len(answers) < batch.num_rows:
        floats, integers = ([column[answers] for column in columns] for columns in (floats, integers))
    return {"floats": floats, "integers": integers}
