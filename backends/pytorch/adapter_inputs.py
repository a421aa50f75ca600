"""The adapters of a batch on their way to the device: one buffer at fixed addresses, for plain and captured steps."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.batch import Batch
from ...kernels.ops.lora import chunked
from ...kernels.ops.step import Adapters, Tiles
from .device import Device

DECODE_CHUNK = 16  # tokens of a tile; the smallest that tensor cores multiply
COLUMNS = 5  # adapter slots, scales, order, starts of tiles, slots of tiles


class AdapterInputs:
    """Fills the buffer for each step with adapters. Two host buffers alternate, as in Inputs."""

    def __init__(self, max_tokens: int, slots: int, device: Device) -> None:
        words = COLUMNS * max_tokens + 1
        self._every = tuple(range(1, slots + 1))
        self._hosts = cycle([torch.empty(words, dtype=torch.int32, pin_memory=device.pinned) for _ in range(2)])
        self._device = torch.zeros(words, dtype=torch.int32, device=device.type)

    def send(self, batch: Batch) -> Adapters | None:
        """Start the copy of a step. None: no row has an adapter."""
        if not batch.adapters.any():
            return None
        chunk = _chunk(batch.num_tokens)
        tiles = self._copy(batch, batch.num_tokens, chunk)
        adapters = self._views(batch.num_tokens, tiles, chunk)
        segments = _segments(batch)
        used = tuple(sorted({slot for _, _, slot in segments} - {0}))
        return adapters._replace(used=used, segments=segments)

    def frame(self, rows: int) -> Adapters:
        """Views for a captured decode step of `rows` rows; without adapters until `fill`."""
        self._device[: COLUMNS * rows + 1].zero_()
        return self._views(rows, rows, DECODE_CHUNK)

    def fill(self, batch: Batch, rows: int) -> None:
        """Start the copy of a decode step into the `frame` of `rows` rows. Rows behind the batch have no adapter."""
        self._copy(batch, rows, DECODE_CHUNK)

    def _copy(self, batch: Batch, size: int, chunk: int) -> int:
        """Copy the columns, each padded to `size`. Returns the number of tiles."""
        host = next(self._hosts)
        lens = np.diff(batch.row_starts)
        slots = np.repeat(batch.adapters, lens)
        scales = np.repeat(np.where(batch.adapters > 0, batch.adapter_scales, np.float32(0)), lens)
        order, starts, tile_slots = chunked(slots, chunk)
        words = COLUMNS * size + 1
        numbers = host.numpy()[:words]
        for number, column in enumerate((slots, scales.view(np.int32), order, tile_slots)):
            _put(numbers[number * size : (number + 1) * size], column, 0)
        _put(numbers[4 * size :], starts, starts[-1])  # tiles behind the last one are empty
        self._device[:words].copy_(host[:words], non_blocking=True)
        return len(tile_slots)

    def _views(self, size: int, tiles: int, chunk: int) -> Adapters:
        slots, scales, order, tile_slots, starts = self._device[: COLUMNS * size + 1].split([size] * 4 + [size + 1])
        cut = Tiles(order, starts[: tiles + 1], tile_slots[:tiles], chunk)
        return Adapters(slots, scales.view(torch.float32), self._every, None, cut)


def _chunk(tokens: int) -> int:
    """Tokens of a tile: long prompts read the factors less often with larger tiles."""
    if tokens < 64:
        return DECODE_CHUNK
    return 32 if tokens < 256 else 64


def _segments(batch: Batch) -> tuple[tuple[int, int, int], ...]:
    """(first token, end, slot); neighbouring rows with the same adapter share a segment."""
    segments: list[tuple[int, int, int]] = []
    starts = batch.row_starts.tolist()
    for row, slot in enumerate(batch.adapters.tolist()):
        first = starts[row]
        if segments and segments[-1][2] == slot:
            first = segments.pop()[0]
        segments.append((first, starts[row + 1], slot))
    return tuple(segments)


def _put(place: NDArray[np.int32], values: NDArray[np.int32], padding: int) -> None:
    place[: len(values)] = values
    place[len(values) :] = padding
