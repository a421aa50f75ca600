"""Copies the adapters of a batch to the device: to one buffer at fixed addresses, which captured steps can read."""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.batch import Batch
from ...kernels.ops.lora import chunked, chunked_rows
from ...kernels.ops.step import Adapters, Tiles
from .device import Device

DECODE_CHUNK = 16  # tokens per tile: the smallest number that tensor cores multiply
COLUMNS = 5  # number of columns: adapter slots, scales, order, slots of tiles, starts of tiles


class BatchAdapters(NamedTuple):
    """The adapters of a batch, on the device."""

    tokens: Adapters | None  # the adapters of all tokens; None: no row has an adapter
    samples: Adapters | None  # the adapter of each drawn token or hidden state; None: none has an adapter


NO_ADAPTERS = BatchAdapters(None, None)


class AdapterInputs:
    """Fills the buffer for each step with adapters: the columns of the tokens, then the columns of the samples.

    Two host buffers alternate, as in Inputs.
    """

    def __init__(self, max_tokens: int, max_rows: int, slots: int, device: Device) -> None:
        words = _words(max(max_tokens, max_rows)) + _words(max_rows)
        self._every = tuple(range(1, slots + 1))
        self._joins_requests = device.joins_requests
        self._max_rows = max_rows
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.zeros(words, dtype=torch.int32, device=device.type)

    def send(self, batch: Batch, samples: NDArray[np.int64], frame: Adapters | None = None) -> BatchAdapters:
        """Start the copy of the adapter slots and scales of a batch's tokens to the device. `frame`: the views of a
        captured step that get them. `samples`: indices of the rows that return a drawn token or a hidden state."""
        if frame is None and not batch.adapters.any():
            return NO_ADAPTERS
        tokens = self._columns(batch, np.arange(batch.num_rows), np.diff(batch.row_starts), frame)
        columns = [tokens]
        chosen = tokens
        all_sampled = len(samples) == batch.num_rows == batch.num_tokens
        if frame is not None or not all_sampled:
            chosen = self._columns(batch, samples, np.ones(len(samples), np.int64))
            columns.append(chosen)
        firsts = self._copy(columns)
        sent = self._views(tokens, 0) if frame is None else frame
        return BatchAdapters(sent, self._views(chosen, firsts[-1]) if chosen.tiles else None)

    def frame(self, tokens: int) -> Adapters:
        """Views for a captured step of at most `tokens` tokens. No token has an adapter until `send` or `fill`."""
        return self._frame(tokens, _chunk(tokens))

    def decode_frame(self, rows: int) -> BatchAdapters:
        """Like `frame`, for a step of `rows` rows, each with one input token and one drawn token or hidden state."""
        frame = self._frame(rows, DECODE_CHUNK)
        return BatchAdapters(frame, frame)

    def fill(self, batch: Batch, frame: Adapters) -> None:
        """Start the copy of a decode step's adapters to its frame. The padding rows after those of the batch get no
        adapter."""
        self._copy([self._columns(batch, np.arange(batch.num_rows), np.ones(batch.num_rows, np.int64), frame)])

    def _frame(self, tokens: int, chunk: int) -> Adapters:
        self._device[: _words(tokens)].zero_()
        incomplete = len(self._every) if self._joins_requests else self._max_rows  # tiles that may not be full
        tiles = min(tokens, incomplete + tokens // chunk)
        return _views(self._device[: _words(tokens)], tiles, chunk)._replace(used=self._every)

    def _columns(
        self, batch: Batch, rows: NDArray[np.int64], lens: NDArray[np.integer], frame: Adapters | None = None
    ) -> _Columns:
        return _Columns(batch, rows, lens, frame, self._joins_requests)

    def _copy(self, columns: list[_Columns]) -> list[int]:
        """Copy the columns to the device, one after the other. Returns the offset of each in words of 4 bytes."""
        host = next(self._hosts)
        numbers = host.numpy()
        firsts = []
        end = 0
        for each in columns:
            firsts.append(end)
            end += _words(each.size)
            each.write(numbers[firsts[-1] : end])
        self._device[:end].copy_(host[:end], non_blocking=True)
        return firsts

    def _views(self, columns: _Columns, first: int) -> Adapters:
        numbers = self._device[first : first + _words(columns.size)]
        segments = columns.segments()
        used = tuple(sorted({slot for _, _, slot in segments} - {0}))
        return _views(numbers, columns.tiles, columns.chunk)._replace(used=used, segments=segments)


class _Columns:
    """The columns of some rows of a batch, in main memory. `lens`: number of tokens of each row. If there is a
    `frame`, the columns are padded to its size."""

    def __init__(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        lens: NDArray[np.integer],
        frame: Adapters | None,
        joins_requests: bool,
    ) -> None:
        self._row_slots = batch.adapters[rows]
        self._lens = lens
        row_scales = np.where(self._row_slots > 0, batch.adapter_scales[rows], np.float32(0))
        tokens = int(lens.sum())
        if frame is None or frame.tiles is None:
            self.size = tokens
            self.chunk = _chunk(tokens)
        else:
            self.size = len(frame.slots)
            self.chunk = frame.tiles.chunk
        self._slots = np.repeat(self._row_slots, lens)
        self._scales = np.repeat(row_scales, lens)
        if joins_requests:
            self._order, self._starts, self._tile_slots = chunked(self._slots, self.chunk)
        else:
            self._order, self._starts, self._tile_slots = chunked_rows(self._row_slots, lens, self.chunk)
        self.tiles = len(self._tile_slots)

    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """Segments (first token, end, slot) of tokens with one adapter. Neighbouring rows with the same adapter share a
        segment."""
        segments: list[tuple[int, int, int]] = []
        end = 0
        for slot, tokens in zip(self._row_slots.tolist(), self._lens.tolist(), strict=True):
            first = end
            end += tokens
            if segments and segments[-1][2] == slot:
                first = segments.pop()[0]
            segments.append((first, end, slot))
        return tuple(segments)

    def write(self, numbers: NDArray[np.int32]) -> None:
        """Write all columns to `numbers`, each padded to `size`."""
        size = self.size
        for index, column in enumerate((self._slots, self._scales.view(np.int32), self._order, self._tile_slots)):
            write_padded(numbers[index * size : (index + 1) * size], column, 0)
        write_padded(numbers[4 * size :], self._starts, self._starts[-1])  # padding: empty tiles


def _words(tokens: int) -> int:
    return COLUMNS * tokens + 1


def _views(numbers: torch.Tensor, tiles: int, chunk: int) -> Adapters:
    """The columns as views of `numbers` [_words(tokens)] int32."""
    size = len(numbers) // COLUMNS
    slots, scales, order, tile_slots, starts = numbers.split([size] * 4 + [size + 1])
    cut = Tiles(order, starts[: tiles + 1], tile_slots[:tiles], chunk)
    return Adapters(slots, scales.view(torch.float32), (), None, cut)


def _chunk(tokens: int) -> int:
    """Number of tokens per tile. With larger tiles, a long prompt reads the factors less often."""
    if tokens < 64:
        return DECODE_CHUNK
    return 32 if tokens < 256 else 64


def write_padded(target: NDArray[Any], values: NDArray[Any], padding: int) -> None:
    """Write `values` to the first elements of `target`, and `padding` to all other elements."""
    target[: len(values)] = values
    target[len(values) :] = padding
